"""``python -m grpo_dist.tools.submit.nodes COUNT --within SECONDS``: wait until COUNT nodes are alive.

Polls the Ray cluster at RAY_ADDRESS, prints how many nodes are alive, and exits with 1 after SECONDS.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence

_EVERY_S = 1.0
_PRINT_EVERY_S = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grpo_dist.tools.submit.nodes", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--within", type=float, required=True, metavar="SECONDS")
    args = parser.parse_args(arguments)
    import ray  # slow; not needed for --help

    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    try:
        wait_for(args.count, args.within, alive)
    except TimeoutError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        ray.shutdown()
    return 0


def alive() -> list[str]:
    """Return hostname/address of each live node."""
    import ray  # slow; not needed for --help

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [f"{node['NodeManagerHostname']}/{node['NodeManagerAddress']}" for node in nodes]


def wait_for(count: int, within_s: float, names: Callable[[], list[str]]) -> None:
    """Wait for ``count`` nodes. Raises TimeoutError, listing the live ones, after ``within_s``."""
    started = time.monotonic()
    printed_at, printed = -_PRINT_EVERY_S, -1
    while True:
        there, now = names(), time.monotonic() - started
        if len(there) != printed or now - printed_at >= _PRINT_EVERY_S:
            print(f"{len(there)} of {count} nodes have joined ({now:.0f} s)", flush=True)
            printed, printed_at = len(there), now
        if len(there) >= count:
            return
        if now >= within_s:
            raise TimeoutError(
                f"{len(there)} of {count} nodes have joined within {within_s:g} s: {', '.join(there)}; check "
                "whether the others are up (sinfo), their logs, and whether they reach the first node"
            )
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
