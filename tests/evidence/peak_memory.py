"""Peak memory of a command and all its processes: the sum of their PSS, where a page that n processes share
counts a share of 1/n in each. Prints the peak, and what each process had then.

    python -m tests.evidence.peak_memory [--every 0.5] COMMAND ...
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil


def pss_bytes(process: psutil.Process) -> int:
    """Return the PSS of ``process``; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two samples")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    process = psutil.Popen(options.command, stdout=sys.stderr)
    peak, at_peak = 0, {}
    while process.poll() is None:
        processes = [process, *process.children(recursive=True)]
        sizes = {p: pss_bytes(p) for p in processes}
        if (total := sum(sizes.values())) > peak:
            peak = total
            at_peak = {f"{p.name()} ({p.pid})": size for p, size in sizes.items() if p.is_running()}
        time.sleep(options.every)
    print(f"peak {peak / 2**30:.2f} GiB")
    for name, size in sorted(at_peak.items(), key=lambda pair: -pair[1]):
        print(f"{size / 2**30:7.2f} GiB  {name}")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
