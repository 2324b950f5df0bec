"""The check of a machine with GPUs: how its lines run, end and are recorded, with fake jobs."""

import json
import math
from importlib.util import find_spec

import psutil
import pytest

from grpo_dist.errors import UserError
from grpo_dist.tools.bench.result import BenchResult
from tests.gpu import check, conftest
from tests.gpu.check import JOBS, LINES, Check, CheckJob, missing
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask, run_job
from tests.support.patience import HANG_S, wait_until


def make(argument, *, limit_s=HANG_S, lines=("first", "second"), **needs):
    return CheckJob("made_job:measure", lines, limit_s, argument, **needs)


def task(directory, argument="", *, rehearsal=True, **figures):
    return CheckTask(argument, rehearsal, directory, {f"device/{k}": v for k, v in figures.items()})


def test_a_claim_holds_within_its_bound_alone():
    findings = Findings()
    findings.at_most("a", 2.0, 2.0, "")
    findings.at_least("b", 2.0, 2.0, "")
    findings.equal("c", 2, 2.0, "")
    assert findings.holds
    for claim in (findings.at_most, findings.at_least, findings.equal):
        claim("nan", math.nan, 2.0, "")
    findings.at_most("a", 2.1, 2.0, "")
    findings.at_least("b", 1.9, 2.0, "")
    findings.equal("c", 1, 2.0, "")
    assert [claim.holds for claim in findings.claims] == [True] * 3 + [False] * 6
    assert Findings.from_plain(json.loads(json.dumps(findings.plain()))).claims[:3] == findings.claims[:3]
    assert str(findings.claims[-2]) == "FAILS: b: 1.9 >= 2 ()"


def test_names_of_lines_are_unique_and_what_says_most_about_a_run_comes_first():
    assert len(set(LINES)) == len(LINES) and all(0 < job.limit_s <= 300 for job in JOBS)
    assert all(find_spec(f"tests.gpu.{job.function.partition(':')[0]}") for job in JOBS)
    first = ["device", "attention", "head", "engine-graphs", "steps", "zero1", "zero2", "zero3", "bench"]
    assert [job.name for job in JOBS][: len(first)] == first


@pytest.mark.parametrize(
    ("needs", "figures", "gpus", "words"),
    [
        ({"gpus": 2}, {}, 1, "2 GPUs, this machine has 1"),
        ({"memory_gib": 20}, {"memory_bytes": 8 * 2**30}, 1, "20 GiB of GPU memory, this one has 8"),
        ({"bfloat16": True}, {"bfloat16": 0.0}, 1, "a GPU that computes bfloat16"),
        ({"modules": ("torch", "no_such_engine")}, {}, 1, "no_such_engine, which is not installed"),
        ({"gpus": 2, "memory_gib": 20}, {"memory_bytes": 80 * 2**30, "bfloat16": 1.0}, 2, ""),
    ],
)
def test_what_a_machine_lacks_is_named_and_a_rehearsal_needs_packages_alone(
    tmp_path, needs, figures, gpus, words
):
    job = make("", **needs)
    assert ", ".join(missing(job, task(tmp_path, rehearsal=False, **figures), gpus)) == words.replace(
        "bfloat16", "bfloat16 (A100 and newer)"
    )
    assert list(missing(job, task(tmp_path), 0)) == ([words] if "modules" in needs else [])


def run_new_job(directory, argument, **limits):
    return run_job(make(argument), task(directory, argument), **{"limit_s": HANG_S, **limits})


def test_a_job_reports_its_lines_and_its_output_is_kept(tmp_path):
    end = run_new_job(tmp_path, "wrong")
    assert end.error == "" and end.findings["first"].holds and not end.findings["second"].holds
    assert end.findings["first"].figures == {"made/number": 2.0}
    assert (tmp_path / "first.log").exists()


def test_a_crash_in_c_leaves_the_stack_of_its_line(tmp_path):
    end = run_new_job(tmp_path, "crashes")
    assert "signal 11" in end.error.splitlines()[0] and "made_job.py" in end.error


@pytest.mark.slow
def test_a_hang_is_ended_with_the_stack_that_it_hangs_in_and_a_cut_is_no_hang(tmp_path):
    ready, limit_s = tmp_path / "first.found", 4.0
    end = run_new_job(tmp_path, "hangs", limit_s=limit_s)
    while not ready.exists() or not ready.read_text():  # a busy machine has not imported everything yet
        limit_s *= 3
        end = run_new_job(tmp_path, "hangs", limit_s=limit_s)
    assert f"not finished within {limit_s:.0f} s" in end.error and "_wait_in_vain" in end.error
    assert list(end.findings) == ["first"] and not end.is_cut
    cut = run_new_job(tmp_path, "hangs", left_s=2 * limit_s)
    assert cut.is_cut and cut.error == "" and list(cut.findings) == ["first"]


def test_nothing_that_a_job_started_outlives_it(tmp_path):
    process = int(run_new_job(tmp_path, "leaves").findings["second"].figures["made/process"])

    def has_ended():
        return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE

    wait_until(has_ended, "a process of the job still runs")


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Run lines of fake jobs as on a machine with one GPU; return the check and its record."""
    device = make("device", lines=("device",))

    def run(*jobs, minutes=30.0):
        monkeypatch.setattr(check, "DEVICE", device)
        monkeypatch.setattr(check, "JOBS", (device, *jobs))
        made_check = Check(tmp_path / "out", rehearsal=False, minutes=minutes, gpus=1)
        for line in [line for job in jobs for line in job.lines]:
            made_check.line(line)
        return made_check, json.loads((tmp_path / "out/gpu-check.json").read_text())

    monkeypatch.setattr("tests.gpu.check.run_job", run_under_its_names)
    return run


def run_under_its_names(job, check_task, **limits):
    """Run a fake job, whose lines are "first" and "second", under the line names of ``job``."""
    end = run_job(job, check_task, limit_s=HANG_S, left_s=limits["left_s"])
    names = zip(job.lines, ("first", "second"), strict=False)
    findings = {new: end.findings[old] for new, old in names if old in end.findings}
    return type(end)(findings, end.error, end.seconds, end.is_cut)


@pytest.mark.slow
def test_one_line_that_does_not_hold_leaves_the_others(checked):
    _, record = checked(make("crashes", lines=("a", "b")), make("wrong", lines=("c", "d")), make("", gpus=2))
    states = {line["name"]: line["state"] for line in record["lines"]}
    assert states == {
        "device": "holds", "a": "holds", "b": "fails", "c": "holds", "d": "fails", "first": "skipped",
        "second": "skipped",
    }  # fmt: skip
    assert record["machine"]["gpu"] == "NVIDIA H100 80GB HBM3" and record["figures"] == {"made/number": 2.0}
    assert (record["kind"], record["schema"]) == ("gpu-check", 3)
    assert record["lines"][-1]["reason"] == "needs 2 GPUs, this machine has 1"


def test_lines_without_time_left_are_not_run_and_end_the_session_with_6(checked):
    made_check, record = checked(make(""), minutes=0.01)
    assert [line["state"] for line in record["lines"]] == ["holds", "not run", "not run"]
    assert record["lines"][-1]["reason"] == "no time of --minutes was left for it"
    stash = pytest.Stash()
    stash[conftest._CHECK] = made_check
    session = type("Session", (), {"config": type("Config", (), {"stash": stash}), "exitstatus": 0})
    conftest.pytest_sessionfinish(session, 0)
    assert session.exitstatus == 6


@pytest.mark.parametrize("minutes", [0.0, math.nan])
def test_no_gpu_or_invalid_minutes_end_the_session_with_2(tmp_path, monkeypatch, minutes):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for value, words in ((minutes, "expected a number above 0"), (10.0, "no NVIDIA GPU .* ARGS=--rehearse")):
        with pytest.raises(pytest.exit.Exception, match=words) as exited:
            conftest.new_check(False, value, tmp_path / "out")
        assert exited.value.returncode == 2 and not (tmp_path / "out").exists()


def test_plan_reads_the_benchmark_of_a_record_which_is_valid_json(tmp_path, checked):
    from tests.tools.bench.test_bench import result

    _, record = checked(make("bench"))
    assert record["bench"] == {"schema": 1, "name": "made"}
    result().write(tmp_path / "bench.json")
    bench = json.loads((tmp_path / "bench.json").read_text())
    (tmp_path / "gpu-check.json").write_text(json.dumps(record | {"bench": bench, "figures": {}}))
    assert BenchResult.read(tmp_path / "gpu-check.json") == result()
    (tmp_path / "gpu-check.json").write_text(json.dumps(record | {"bench": None}))
    with pytest.raises(UserError, match=r"has no benchmark.*make gpu-check"):
        BenchResult.read(tmp_path / "gpu-check.json")
