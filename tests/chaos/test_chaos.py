"""The short form of `make chaos`: a real job that loses one of everything; and each check on a failure."""

import os
import subprocess
import sys
import uuid
from random import Random
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chaos import sandbox, verdict
from tests.chaos.__main__ import Chaos, _kinds, _options, long_groups, short_groups
from tests.chaos.events import Event
from tests.chaos.faults import Connection, reset
from tests.chaos.find import MARK, Family, is_of_ray
from tests.chaos.job import End, Line, python_path
from tests.chaos.play import STILL_S
from tests.chaos.report import goodput, table
from tests.support.patience import HANG_S, wait_for_end, wait_until

LINES = [{"step": i, "reward/mean": i / 10, "reward/unscored": 0.0, "time/step_s": 1.0} for i in (1, 2, 3, 4)]


def changed(step, **values):
    return [line | values if line["step"] == step else line for line in LINES]


BETTER = [line | {"reward/mean": 0.9 + line["reward/mean"] / 10} for line in LINES]
LEDGER_END = "trained.\nledger: 8 prompts sampled = 8 trained\n"
UNBALANCED = "but the ledger does not balance: ledger.jsonl: prompt p3 was sampled 2 times. Bye\n"


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (verdict.unfinished(LINES, 4), None),
        (verdict.unfinished(LINES, 5), "[1, 2, 3, 4], expected 1 to 5"),
        (verdict.unfinished([*LINES, LINES[-1]], 4), "[1, 2, 3, 4, 4]"),
        (verdict.unbalanced(LEDGER_END), None),
        (verdict.unbalanced(LEDGER_END + UNBALANCED), "ledger.jsonl: prompt p3 was sampled 2 times"),
        (verdict.unbalanced("trained.\n"), "no totals at the end of the run"),
        (verdict.mismatched(changed(2, **{"mismatch/logprob_diff_max": 9e-7})), None),
        (
            verdict.mismatched(changed(2, **{"mismatch/logprob_diff_max": 0.2})),
            "step 2: log-probs differ by up to 2.0e-01",
        ),
        (verdict.difference(changed(2, **{"time/step_s": 9.0, "restarts/rollout": 1.0}), LINES), None),
        (verdict.difference(changed(3, **{"reward/mean": 0.31}), LINES), "step 3, reward/mean: 0.31"),
        (verdict.inaccurate(changed(1, **{"reward/mean": 0.12}), LINES), None),
        (verdict.inaccurate(BETTER, LINES), "mean reward 0.9250, undisturbed 0.2500"),
        (verdict.left_in_memory(["a"], ["a", "b"], in_use=["b"]), None),
        (verdict.left_in_memory(["a"], ["a", "b"]), "1 file(s) of shared memory: b"),
    ],
)
def test_each_broken_promise_is_reported_and_only_those(result, problem):
    assert result is None if problem is None else problem in result


def test_all_kinds_are_played_and_a_file_is_torn_only_after_its_driver_ended():
    everything = [kind for kind in _kinds() if "starting" not in kind]
    assert sorted(f.kind for group in long_groups(None, everything) for f in group) == sorted(everything)
    assert {len(group) for group in long_groups(None, everything)} == {1, 2, 6}
    for refusal, wanted, kills in (
        (None, everything, False),
        (None, ["torn file"], True),
        ("no", everything, True),
    ):
        groups = long_groups(refusal, wanted)
        (torn,) = [f for group in groups for f in group if f.kind == "torn file"]
        assert torn.kills == kills
    by_seed = [{f.kind for group in short_groups(None, Random(seed)) for f in group} for seed in range(20)]
    at_syncs = {kind for kind in everything if kind.endswith("_weights")}
    never = {"SIGKILL driver", "SIGTERM driver", *at_syncs}
    assert set(everything) - set().union(*by_seed) == never and len(at_syncs) == 4
    assert {len(kinds & {"SIGKILL policy", "SIGSTOP policy"}) for kinds in by_seed} == {1}


@pytest.mark.parametrize(
    ("title", "with_child", "of_the_job"),
    [
        ("ray::IDLE", False, 0),
        ("/ray/autoscaler/_private/monitor.py", False, 0),
        ("/ray/dashboard/dashboard.py", True, 0),  # a child's command only names multiprocessing
        ("ray-dashboard-NodeHead-0", False, 0),
        ("/ray/core/src/ray/raylet/raylet --agent=/ray/dashboard/agent.py", True, 1),  # a worker
    ],
)
def test_processes_of_nodes_do_not_belong_to_a_job_on_them(title, with_child, of_the_job):
    mark = uuid.uuid4().hex
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    command = [sys.executable, "-c", f"{child if with_child else 'input()'}  # {title}"]
    family = Family(mark)
    with subprocess.Popen(command, env=os.environ | {MARK: mark}, stdin=subprocess.PIPE) as launched:
        try:
            wait_until(lambda: len(family.living()) == 1 + with_child, "the processes do not start")
            pids = [process.pid for process in Family(mark, spared=is_of_ray).living()]
            assert len(pids) == of_the_job and launched.pid not in pids
        finally:
            family.kill()


def test_a_loss_is_noticed_in_time_and_on_a_busy_machine_late_but_not_never():
    assert verdict.unnoticed([lost("SIGKILL rollout", at=100.0, noticed=101.0)]) is None
    late = lost("SIGKILL rollout", at=100.0, noticed=160.0)
    assert "after 60.0 s" in verdict.unnoticed([late])
    assert verdict.unnoticed([late], verdict.BUSY) is None
    node = lost("node of rollout lost", at=100.0, noticed=140.0)
    assert verdict.unnoticed([node]) is None
    late.noticed = None
    assert "never noticed" in verdict.unnoticed([late], verdict.BUSY)
    gone = lost("SIGKILL rollout", at=50.0, exit_code=0, launch_ended=0)
    slow = lost("SIGKILL rollout", 0.0, 25.0)
    assert "no recovery in 60.0 s" in verdict.unrecovered([gone], [slow, gone], 110.0)
    assert verdict.unrecovered([gone], [slow, gone], 110.0, verdict.BUSY) is None
    assert "never seen" in verdict.unrecovered([gone], [gone], 110.0, verdict.BUSY)


@pytest.mark.parametrize(("version", "fresh"), [(0, False), (1, True), (2, False)])
def test_a_token_of_other_weights_than_the_step_is_reported(tmp_path, version, fresh):
    samples = tmp_path / "samples"
    samples.mkdir()
    for step, versions in ((1, [0, 0]), (2, [1, version])):
        rows = pa.table({"uid": ["a"], "policy_versions": [versions]})
        pq.write_table(rows, samples / f"step_{step:06d}.parquet")
    problem = verdict.stale(tmp_path, 2)
    assert problem is None if fresh else f"prompt a: tokens of versions [{version}]" in problem
    assert (verdict.stale(tmp_path, 2, max_staleness=1) is None) == (version < 2)
    (samples / "step_000001.parquet").unlink()
    assert verdict.stale(tmp_path, 2) == "step 1 has no samples"


def test_an_orphan_is_found_by_its_environment_and_only_it_is_ended():
    """Its parent is gone, so it cannot be found by descent."""
    mark = uuid.uuid4().hex
    family, others = Family(mark), Family("another")
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {MARK: mark}, check=True, timeout=HANG_S)
    assert others.living() == []
    assert "time.sleep(60)" in verdict.orphans(family, seconds=0.1)
    others.kill()
    assert len(family.living()) == 1
    family.kill()
    assert verdict.orphans(family, seconds=HANG_S) is None


def lost(kind, at, recovered=None, **values):
    return Event(kind, at=at, step=3, phase="sample", role="rollout", recovered=recovered, **values)


def test_a_stage_that_hangs_without_a_fault_is_reported():
    late = Line(200.0, 0, "stage sample: batch 7 sampled: not finished within 120 s: restarting all workers")
    assert verdict.hung([Line(90.0, 0, "step 6"), late], [lost("SIGSTOP rollout", 70.0)]) is None
    assert verdict.hung([Line(90.0, 0, "step 6")], []) is None
    for far in ([], [lost("SIGSTOP rollout", 40.0)], [lost("SIGSTOP rollout", 201.0)]):
        assert verdict.hung([late], far).startswith("stage sample: batch 7 sampled came to no end in 120 s")


def test_an_engine_that_never_returns_is_reported_even_if_the_other_one_finishes_the_job():
    finished = {"exit_code": 0, "launch_ended": 0}
    gone = lost("SIGKILL rollout", at=50.0, **finished)
    others = [lost("SIGKILL rollout", 0.0, 25.0), lost("SIGSTOP rollout", 30.0, 78.5, noticed=44.0)]
    reference = Event("SIGKILL reference", at=0.0, step=3, phase="idle", role="reference", recovered=99.0)
    after_start = lost("SIGKILL rollout", 0.0, 90.0, exit_code=1, launch_ended=0)

    def error(last_step_at):
        return verdict.unrecovered([*others, gone], [reference, after_start, *others, gone], last_step_at)

    assert error(84.0) is None  # 34 s were left, and one took 34.5 s
    assert error(90.0) == "SIGKILL rollout at step 3: no recovery in 40.0 s, elsewhere it took 34.5 s at most"
    alone = verdict.unrecovered([gone], [reference, after_start, gone], 51.0)
    assert alone == "SIGKILL rollout at step 3: no recovery in 1.0 s, elsewhere it was never seen"
    assert verdict.unrecovered([gone], [gone], 49.0) is None  # no later step that could show a recovery
    hung = lost("SIGSTOP rollout", at=40.0, noticed=50.0, **finished)
    assert verdict.unrecovered([hung], [*others, hung], 84.0) is None
    assert "no recovery in 40.0 s" in verdict.unrecovered([hung], [*others, hung], 90.0)
    forgotten = lost("SIGKILL rollout", at=83.0)  # open, and no launch has ended since
    assert "no recovery in 1.0 s" in verdict.unrecovered([forgotten], [*others, forgotten], 84.0)
    ended_by_it = Event("SIGKILL driver", at=0.0, step=3, phase="running", exit_code=-9, launch_ended=0)
    assert verdict.unrecovered([ended_by_it], [ended_by_it], 90.0) is None


def ended_by(kind, code, launch=0):
    return Event(kind, at=0.0, step=3, phase="sample", exit_code=code, launch_ended=launch)


def test_an_end_by_a_fault_that_should_be_survived_is_reported():
    problem = verdict.ended([1, 0], [ended_by("SIGKILL policy", 1)])
    assert problem == "SIGKILL policy at step 3 ended the run with 1, expected no end"
    problem = verdict.ended([143, 0], [ended_by("SIGTERM driver", 143)])
    assert problem == "SIGTERM driver at step 3 ended the run with 143, expected [75]"
    fine = [("SIGTERM driver", 75), ("SIGKILL driver", -9), ("disk full", 1), ("torn file", -9)]
    assert all(verdict.ended([code, 0], [ended_by(kind, code)]) is None for kind, code in fine)
    assert verdict.ended([1, 0], [ended_by("SIGKILL policy", 1), ended_by("disk full", 1)]) is None
    assert verdict.ended([0], [Event("SIGKILL policy", at=0.0, step=3, phase="sample")]) is None
    assert verdict.ended([0], [ended_by("SIGKILL policy", 0)]) is None  # the job finished


def finished_job(directory, monkeypatch, lines, begins, ends, *overrides):
    """Return the chaos of ``overrides`` and a finished job with metrics ``lines``, a step for each launch."""
    monkeypatch.setattr(verdict, "read_metrics", lambda _: lines)
    monkeypatch.setattr("tests.chaos.__main__.audit", lambda *_, **__: None)
    job = SimpleNamespace(
        begins=begins, ends=ends, lines=[], family=SimpleNamespace(living=list), run_dir=directory,
        disk=SimpleNamespace(name="job1"), output=lambda _: "",
        steps=lambda: [(at, step) for step, at in enumerate(begins, 1)],
    )  # fmt: skip
    return Chaos(_options(["--steps", "4", *overrides]), directory, sandbox.Sandbox(directory, None)), job


def test_a_job_is_checked_for_recovery_and_for_the_reason_of_every_end(tmp_path, monkeypatch):
    chaos, job = finished_job(tmp_path, monkeypatch, LINES, [1.0, 2.0], [End(1.5, 1), End(60.0, 0)])
    before = lost("SIGKILL rollout", at=0.5)  # in an earlier job
    chaos._events = [before, lost("SIGKILL rollout", at=1.8, exit_code=0, launch_ended=1)]
    checks = chaos._judge(job, LINES)
    assert "no recovery in 0.2 s, elsewhere it was never seen" in checks["recovered"]
    assert checks["survived"] == "launch 0 ended with 1, and nothing had been done to it"
    assert not chaos._passes(job, checks) and f"job1: survived: {checks['survived']}" in chaos._problems
    before.recovered = 2.0
    assert chaos._judge(job, LINES)["recovered"] is None
    assert chaos._passes(job, {"recovered": None})


@pytest.mark.parametrize(
    ("overrides", "role", "differs"),
    [([], "rollout", True), (["max_staleness=1"], "policy", True), (["max_staleness=1"], "rollout", False)],
)
def test_different_numbers_are_reported_except_after_an_engine_that_returned_ahead(
    tmp_path, monkeypatch, overrides, role, differs
):
    lines = changed(3, **{"reward/mean": 0.31})
    chaos, job = finished_job(tmp_path, monkeypatch, lines, [1.0], [End(60.0, 0)], *overrides)
    chaos._events = [Event(f"SIGKILL {role}", at=2.0, step=3, phase="sample", role=role)]
    assert bool(chaos._judge(job, LINES)["same numbers"]) == differs


def test_an_end_without_an_explanation_is_reported():
    full = Event("disk full", at=0.0, step=3, phase="running", exit_code=1, launch_ended=0)
    assert "disk full at step 3" in verdict.silent([full], {0: "killed"})
    assert verdict.silent([full], {0: "OSError: [Errno 28] No space left on device"}) is None
    torn = Event(
        "torn file", at=0.0, step=3, phase="running", exit_code=-9, launch_ended=0, torn="state.json"
    )
    output = "warning: damaged checkpoint, not used: step_000002: state.json has 3 bytes instead of 400"
    assert "no later launch named it" in verdict.silent([torn], {0: output, 1: "resuming"})
    assert verdict.silent([torn], {0: "", 1: output}) is None


def test_only_a_later_launch_recovers_from_the_end_of_a_run():
    """A terminated driver finishes and saves its step before it ends."""
    steps = [(1.0, 1), (2.5, 2), (3.0, 3)]
    job = SimpleNamespace(lines=[], steps=lambda: steps, ends=[End(4.0, 75)])
    event = Event("SIGTERM driver", at=2.0, step=1, phase="running", exit_code=75, launch_ended=0)
    assert not event.look(job)
    steps.append((30.0, 4))
    assert event.look(job) and event.recovered == 30.0


def test_recovery_needs_a_replacement_and_a_further_step():
    job = SimpleNamespace(lines=[], steps=lambda: [(1.0, 1), (5.5, 2)])
    event = Event("SIGKILL rollout", at=2.0, step=1, phase="sample", role="rollout")
    assert not event.look(job)
    job.lines = [
        SimpleNamespace(at=3.0, text="(raylet) A worker died.\x1b[0mrollout-0 is lost (killed); restart 1"),
        SimpleNamespace(at=9.0, text="rollout-0 serves again"),
    ]
    assert event.look(job)
    assert (event.noticed, event.recovered) == (3.0, 9.0)
    assert "7.0 s" in table([event], {"disk full": "no mounts here"})
    assert goodput([(0.0, 1), (10.0, 6)], undisturbed_s=1.0) == 0.5


def test_a_connection_is_reset_under_both_of_its_ends():
    code = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "one = socket.create_connection(server.getsockname())\n"
        "other, _ = server.accept()\n"
        "print(one.fileno(), flush=True)\n"
        "try: other.recv(1)\n"
        "except ConnectionResetError: print('reset', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        descriptor = int(child.stdout.readline())
        reset(Connection(psutil.Process(child.pid), descriptor, "one-other"))
        assert child.stdout.readline() == "reset\n"


def test_the_end_of_a_driver_is_over_only_when_its_launch_has_ended():
    """Otherwise the full disk that ended it would never be freed."""
    gone = SimpleNamespace(is_running=lambda: False)
    job = SimpleNamespace(lines=[], steps=lambda: [(1.0, 1), (5.5, 2)])
    event = Event("disk full", at=2.0, step=1, phase="running", victim=gone)
    assert not event.look(job)
    event.exit_code = 1
    assert event.look(job)


# No timeout: it ends itself when its job stops finishing steps.
@pytest.mark.evidence
@pytest.mark.timeout(0)
def test_a_job_that_loses_one_of_everything_ends_like_the_undisturbed_one(tmp_path):
    """Prints the recovery times; run `make chaos` for twenty events of each kind."""
    command = [sys.executable, "-m", "tests.chaos", "--short", "--steps", "24", "--seed", "0"]
    command += ["rollout.num_workers=1"]
    environment = os.environ | {"PYTHONPATH": python_path()}
    with (tmp_path / "said").open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            wait_for_end(process, lambda: (tmp_path / "said").stat().st_size, hang_s=2 * STILL_S)
        finally:
            process.terminate()  # it ends its processes
            process.wait(timeout=HANG_S)
    output = (tmp_path / "said").read_text()
    print(output)
    assert process.returncode == 0, output[-6000:]
