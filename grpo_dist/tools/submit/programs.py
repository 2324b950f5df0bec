"""What every target needs: programs of the cluster (sbatch, squeue, kubectl) with a deadline, and the files
of `launch/`, which lie next to the packages in a checkout, else where the wheel installed them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from grpo_dist.errors import UserError

_DEADLINE_S = 120.0
_CHECKOUT = Path(__file__).resolve().parents[3] / "launch"
INSTALLED = "share/grpo-dist/launch"


class Refused(UserError):
    """The program failed; the message is its own."""


def ask(command: Sequence[str], *, given: str | None = None) -> str:
    """Run ``command`` and return its output.

    Raises Refused with its message when it fails, UserError when it is missing or does not answer.
    """
    check_there(command[0])
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"`{' '.join(command)}` did not answer within {_DEADLINE_S:g} s") from error
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).replace("\n", " ")
        raise Refused(f"`{' '.join(command)}` failed with exit code {done.returncode}: {output}")
    return done.stdout


def lines(command: Sequence[str]) -> Iterator[str]:
    """Yield the lines that ``command`` prints while it runs; terminate it when the reader stops.

    Its errors go to stderr. Raises Refused when it fails, UserError when it is missing.
    """
    check_there(command[0])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield from process.stdout
            code = process.wait(timeout=_DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
    if code:
        raise Refused(f"`{' '.join(command)}` failed with exit code {code}")


def check_there(program: str) -> None:
    """Raise UserError when ``program`` is not on the path."""
    if shutil.which(program) is None:
        raise UserError(
            f"{program}: no such program here; submit from a machine that has it, such as a login node"
        )


def template(name: str) -> str:
    """Return the text of `launch/NAME`. Raises FileNotFoundError for a broken installation."""
    here = _CHECKOUT / name
    if here.is_file():
        return here.read_text(encoding="utf-8")
    try:
        found = [f for f in files("grpo-dist") or [] if f.as_posix().endswith(f"{INSTALLED}/{name}")]
    except PackageNotFoundError:
        found = []
    if not found:
        raise FileNotFoundError(f"launch/{name} is not installed; install grpo-dist again")
    return Path(str(found[0].locate())).read_text(encoding="utf-8")
