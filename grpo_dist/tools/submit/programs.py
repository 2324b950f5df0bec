"""What every target needs: programs of the cluster (sbatch, squeue, kubectl) with a deadline, and the files
of `launch/`, which lie next to the packages in a checkout, else where the wheel installed them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from grpo_dist.errors import UserError

_DEADLINE_S = 120.0
_CHECKOUT = Path(__file__).resolve().parents[3] / "launch"
INSTALLED = "share/grpo-dist/launch"


class Refused(UserError):
    """The program failed; the message is its own."""


def ask(command: Sequence[str], *, stdin: str | None = None, is_printed: bool = False) -> str:
    """Run ``command`` and return its output. ``is_printed``: print it as it comes instead, with no deadline.

    Raises Refused with its message when it fails, UserError when it is missing or does not answer.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"{command[0]}: no such program here; submit from a machine that has it, such as a login node"
        )
    try:
        done = subprocess.run(
            command, input=stdin, text=True, check=False,
            capture_output=not is_printed, timeout=None if is_printed else _DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(f"`{' '.join(command)}` did not answer within {_DEADLINE_S:g} s") from error
    if done.returncode:
        output = "" if is_printed else ": " + (done.stderr.strip() or done.stdout.strip()).replace("\n", " ")
        raise Refused(f"`{' '.join(command)}` failed with exit code {done.returncode}{output}")
    return "" if is_printed else done.stdout


def template(name: str) -> str:
    """Return the text of `launch/NAME`. Raises FileNotFoundError for a broken installation."""
    here = _CHECKOUT / name
    if here.is_file():
        return here.read_text(encoding="utf-8")
    try:
        installed = [f for f in files("grpo-dist") or [] if f.as_posix().endswith(f"{INSTALLED}/{name}")]
    except PackageNotFoundError:
        installed = []
    if not installed:
        raise FileNotFoundError(f"launch/{name} is not installed; install grpo-dist again")
    return Path(str(installed[0].locate())).read_text(encoding="utf-8")
