"""Runs the findings one after another: ``python findings/run.py [--latest] [NAME ...]``.

Prints a line per finding: holds, changed, or not installed, with its seconds; below changed findings, the end
of their output. Exits 1 unless all hold. ``--latest`` installs the newest releases instead of the
pinned ones, shows which findings they changed, and exits 0.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NOT_INSTALLED = 2  # exit code if pip could not install the packages


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the findings.")
    parser.add_argument("--latest", action="store_true", help="newest releases, not the pinned; exits 0")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a script without .sh (default: all)")
    options = parser.parse_args()
    scripts = {path.stem: path for path in sorted(FOLDER.glob("*.sh"))}
    if unknown := [name for name in options.names if name not in scripts]:
        parser.error(f"no finding {', '.join(unknown)} in {FOLDER}; expected some of {', '.join(scripts)}")
    environment = os.environ | {"PYTHON": sys.executable, "FINDINGS_LATEST": "1" if options.latest else ""}
    failed = False
    for name in options.names or scripts:
        begin = time.monotonic()
        done = subprocess.run(["bash", scripts[name]], env=environment, capture_output=True, text=True)
        verdict = {0: "holds", NOT_INSTALLED: "not installed"}.get(done.returncode, "changed")
        print(f"{verdict:13s} {name} ({time.monotonic() - begin:.0f} s)", flush=True)
        if done.returncode:
            failed = True
            last = (done.stdout + done.stderr).splitlines()[-12:]
            print("".join(f"    {line}\n" for line in last), flush=True)
    return 1 if failed and not options.latest else 0


if __name__ == "__main__":
    sys.exit(main())
