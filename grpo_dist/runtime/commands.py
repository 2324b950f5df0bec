"""Commands of this project, run from Python."""

from __future__ import annotations

import subprocess
import sys


def run_command(*arguments: str) -> str:
    """Run `grpo-dist` with ``arguments`` in a process of its own, as a shell does, and return its output.

    Its errors go to this process's own. Raises CalledProcessError for a command that fails.
    """
    command = [sys.executable, "-m", "grpo_dist.cli", *arguments]
    return subprocess.check_output(command, text=True)  # bounded: the command has deadlines
