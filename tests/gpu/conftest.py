"""`make gpu-check`: only tests marked ``gpu`` run, with `pytest -m gpu`, and write `gpu-check.json`."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from grpo_dist.errors import UserError
from tests.gpu.check import Check

_CHECK = pytest.StashKey[Check]()
_INCOMPLETE = 6  # exit code: no line fails, but some were not run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu-check")
    group.addoption("--rehearse", action="store_true", help="run the parts without a GPU, tiny, on the CPU")
    group.addoption("--minutes", type=float, default=10.0, help="for all lines in total (default: 10)")
    group.addoption("--output", default="runs/gpu-check", help="directory of gpu-check.json and the logs")


@pytest.hookimpl(trylast=True)  # after marks have selected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the check in other runs of the suite, which rehearse its jobs."""
    if "gpu" not in config.option.markexpr:
        deselected = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)


@pytest.fixture(scope="session")
def check(request: pytest.FixtureRequest) -> Check:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job's processes end with the check
    config, option = request.config, request.config.getoption
    config.stash[_CHECK] = check = new_check(option("rehearse"), option("minutes"), Path(option("output")))
    return check


def new_check(rehearsal: bool, minutes: float, directory: Path) -> Check:
    """Begin a check. End the session with one message if it cannot run."""
    from grpo_dist.runtime.hardware import usable_gpus

    if not 0 < minutes < math.inf:
        pytest.exit(f"--minutes {minutes:g}: expected a number above 0", returncode=2)
    try:
        gpus = 0 if rehearsal else usable_gpus()
    except UserError as error:
        pytest.exit(str(error), returncode=2)
    if not gpus and not rehearsal:
        pytest.exit(
            "no NVIDIA GPU that torch can use: look at `nvidia-smi` and install a CUDA build of torch; or "
            "rehearse what needs no GPU: make gpu-check ARGS=--rehearse",
            returncode=2,
        )
    return Check(directory.absolute(), rehearsal=rehearsal, minutes=minutes, gpus=gpus)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print each line with its figures in words, its claims and their bounds."""
    if (check := config.stash.get(_CHECK, None)) is None:
        return
    write = terminalreporter.write_line
    terminalreporter.section("gpu-check: " + ("rehearsal on the CPU" if check.rehearsal else "this machine"))
    for line in check.lines.values():
        reason = f": {line.reason.partition(chr(10))[0]}" if line.reason else ""
        write(f"{line.name}: {line.state}, {line.seconds:.0f} s{reason}", red=line.state == "fails")
        for text in (*line.notes, *map(str, line.claims)):
            write(f"    {text}")
    if left := check.lines_with_state("not run"):
        names = " or ".join(left)
        write(
            f"{len(left)} lines were not run; run them alone with: make gpu-check "
            f"ARGS=\"-k '{names}' --output {check.directory}-rest\", or all with more than --minutes "
            f"{check.minutes:g}"
        )
    write(f"written: {check.directory}/gpu-check.json; the output of each line is in the same directory")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    check = session.config.stash.get(_CHECK, None)
    if check is not None and exitstatus == 0 and check.lines_with_state("not run"):
        session.exitstatus = _INCOMPLETE
