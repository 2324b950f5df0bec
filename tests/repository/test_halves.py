"""`make test` runs both halves of the suite at once and fails if either fails."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support import halves
from tests.support.documents import ROOT
from tests.support.patience import HANG_S, wait_until
from tests.support.tiers import slow_after

# Replaces pytest in both halves. Each waits until the other has started.
_STUB = """#!/bin/sh
case "$*" in *"not machine"*) half=others code=$OTHERS ;; *) half=clusters code=$CLUSTERS ;; esac
trap 'echo interrupted >> "$DIRECTORY/$half"; exit 2' INT
echo "$*" > "$DIRECTORY/$half"
until [ -e "$DIRECTORY/others" ] && [ -e "$DIRECTORY/clusters" ]; do sleep 0.1; done
while [ "$code" = wait ]; do sleep 0.1; done
echo "report of $half"
echo "error of $half" >&2
exit "$code"
"""


@pytest.fixture
def start_halves(tmp_path):
    """Start the halves with a fake Python that returns these codes."""
    stub = tmp_path / "python"
    stub.write_text(_STUB)
    stub.chmod(0o755)

    def begin(clusters, others, arguments=("-k", "loss")):
        program = (
            "import sys; from tests.support import halves; "
            f"sys.exit(halves.main({list(arguments)!r}, {str(stub)!r}))"
        )
        variables = {"CLUSTERS": str(clusters), "OTHERS": str(others), "DIRECTORY": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, env=os.environ | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return begin


@pytest.mark.parametrize(
    ("clusters", "others", "fails"),
    slow_after(
        [(0, 0, False), (0, 5, False), (5, 0, False), (1, 0, True), (0, 1, True), (2, 5, True), (5, 5, True)],
        2,
    ),
)
def test_both_halves_run_at_once_and_the_exit_code_reports_a_failure_of_either(
    start_halves, tmp_path, clusters, others, fails
):
    """pytest returns 5 if no test is selected, which may happen in one half."""
    process = start_halves(clusters, others)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == int(fails), output
    lines = output.splitlines()
    assert set(lines[:2]) == {"report of clusters", "error of clusters"}
    assert set(lines[3:5]) == {"report of others", "error of others"}, "the second half after the first"
    assert lines[5:] == ([f"failed: exit codes {clusters} and {others}"] if fails else [])
    calls = [(tmp_path / half).read_text() for half in ("clusters", "others")]
    assert all("-m pytest -n 2 --dist loadfile --no-loadscope-reorder" in call for call in calls)
    tier = "and not evidence and not slow -k loss\n"
    assert calls[0].endswith(f"-m machine {tier}")
    assert calls[1].endswith(f"-m not machine {tier}"), "every test is in one half"


def test_all_tests_are_both_tiers(start_halves, tmp_path):
    process = start_halves(0, 0, ["--all", "-x"])
    process.communicate(timeout=HANG_S)
    assert (tmp_path / "clusters").read_text().endswith("-m machine and not evidence -x\n")
    assert (tmp_path / "others").read_text().endswith("-m not machine and not evidence -x\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_both_halves_also_in_the_background(start_halves, tmp_path, number):
    """A shell starts a background job with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start_halves("wait", "wait")
    finally:
        signal.signal(signal.SIGINT, before)
    files = [tmp_path / half for half in ("clusters", "others")]
    wait_until(
        lambda: all(file.exists() and file.stat().st_size for file in files), "the halves did not start"
    )
    process.send_signal(number)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert all(file.read_text().endswith("interrupted\n") for file in files)


def test_an_interrupt_while_a_half_starts_comes_once_both_are_listed():
    interrupts = halves._Interrupts()
    interrupts(signal.SIGINT, None)  # raises nothing yet
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    quiet = halves._Interrupts()
    quiet.release()
    with pytest.raises(KeyboardInterrupt):
        quiet(signal.SIGTERM, None)
