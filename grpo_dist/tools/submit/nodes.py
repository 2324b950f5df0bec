"""``python -m grpo_dist.tools.submit.nodes COUNT --within SECONDS``: wait until COUNT nodes are alive.

Polls the Ray cluster at RAY_ADDRESS, prints the number of live nodes, and exits with 1 after SECONDS.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

_EVERY_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="grpo_dist.tools.submit.nodes", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--within", type=float, required=True, metavar="SECONDS")
    args = parser.parse_args()
    import ray  # slow; not needed for --help

    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    started, before = time.monotonic(), 0
    while True:
        nodes = [f"{n['NodeManagerHostname']}/{n['NodeManagerAddress']}" for n in ray.nodes() if n["Alive"]]
        joined, waited_s = f"{len(nodes)} of {args.count} nodes have joined", time.monotonic() - started
        if len(nodes) != before:
            print(f"{joined} ({waited_s:.0f} s)", flush=True)
            before = len(nodes)
        if len(nodes) >= args.count:
            return 0
        if waited_s >= args.within:
            break
        time.sleep(_EVERY_S)
    print(
        f"error: {joined} within {args.within:g} s: {', '.join(nodes)}; check whether the others are up "
        "(sinfo), their logs, and whether they reach the first node",
        file=sys.stderr,
        flush=True,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
