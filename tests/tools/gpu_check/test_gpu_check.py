"""`grpo-dist gpu-check`: how its lines run, end and are recorded, on made jobs."""

import json
import math
from dataclasses import replace

import psutil
import pytest
from rich.console import Console

from grpo_dist.cli import main
from grpo_dist.errors import UserError
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.gpu_check import command, run
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.lines import DEVICE, JOBS, CheckJob, CheckLine, CheckTask, Needs
from grpo_dist.tools.gpu_check.process import JobEnd, run_job
from grpo_dist.tools.gpu_check.record import CheckRecord, LineRecord
from grpo_dist.tools.gpu_check.run import CheckOptions, missing, run_check
from grpo_dist.tools.gpu_check.table import print_record
from tests.support.patience import HANG_S, wait_until

MADE = "tests.support.made_check_job"
LINES = (CheckLine("first", "made", "all of it"), CheckLine("second", "made", "all of it"))


def made(argument, *, limit_s=HANG_S, lines=LINES, **needs):
    return CheckJob(MADE, limit_s, Needs(**needs), lines, argument)


def task(directory, argument="", *, rehearsal=True, **known):
    return CheckTask(argument, rehearsal, directory, {f"device/{k}": v for k, v in known.items()})


def test_a_claim_holds_within_its_bound_alone():
    found = Findings()
    found.at_most("a", 2.0, 2.0, "")
    found.at_least("b", 2.0, 2.0, "")
    found.equal("c", 2, 2.0, "")
    assert found.holds
    for claim in (found.at_most, found.at_least, found.equal):
        claim("nan", math.nan, 2.0, "")
    found.at_most("a", 2.1, 2.0, "")
    found.at_least("b", 1.9, 2.0, "")
    found.equal("c", 1, 2.0, "")
    assert [claim.holds for claim in found.claims] == [True] * 3 + [False] * 6
    assert Findings.of(json.loads(json.dumps(found.plain()))).claims[:3] == found.claims[:3]


def test_names_of_lines_are_unique_and_their_jobs_exist():
    from importlib.util import find_spec

    names = [line.name for job in JOBS for line in job.lines]
    assert len(names) == len(set(names)) and JOBS[0] is DEVICE
    assert all(find_spec(job.module) for job in JOBS)
    assert all(0 < job.limit_s <= 300 for job in JOBS)


def test_what_says_most_about_a_run_comes_first():
    first = ["device", "attention", "head", "engine-graphs", "steps", "zero1", "zero2", "zero3", "bench"]
    assert [job.name for job in JOBS][: len(first)] == first


def test_the_list_names_every_line_and_what_it_needs(capsys):
    assert main(["gpu-check", "--list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(line.name in shown for job in JOBS for line in job.lines)
    assert "2 GPUs" in shown and "vllm" in shown


@pytest.mark.parametrize(
    ("needs", "known", "gpus", "words"),
    [
        (Needs(gpus=2), {}, 1, "2 GPUs, this machine has 1"),
        (Needs(memory_gib=20), {"memory_bytes": 8 * 2**30}, 1, "20 GiB of GPU memory, this one has 8"),
        (Needs(bfloat16=True), {"bfloat16": 0.0}, 1, "a GPU that computes bfloat16"),
        (Needs(modules=("vllm", "no_such_engine")), {}, 1, "no_such_engine, which is not installed"),
        (Needs(gpus=2, memory_gib=20), {"memory_bytes": 80 * 2**30, "bfloat16": 1.0}, 2, None),
    ],
)
def test_what_a_machine_lacks_is_named(tmp_path, needs, known, gpus, words):
    found = ", ".join(missing(needs, task(tmp_path, rehearsal=False, **known), gpus))
    assert words in found if words else found == ""


def test_a_rehearsal_needs_packages_alone(tmp_path):
    needs = Needs(gpus=2, memory_gib=20, modules=("no_such_engine",))
    assert list(missing(needs, task(tmp_path), 0)) == ["no_such_engine, which is not installed"]


def ended(directory, argument, limit_s=HANG_S):
    return run_job(made(argument), task(directory, argument), limit_s=limit_s)


def test_a_job_reports_its_lines_and_its_output_is_kept(tmp_path):
    end = ended(tmp_path, "wrong")
    assert end.error == "" and end.found["first"].holds and not end.found["second"].holds
    assert end.found["first"].figures == {"made/number": 2.0}
    assert (tmp_path / "first.log").exists()


def test_an_error_is_reported_and_what_was_reported_before_it_stays(tmp_path):
    end = ended(tmp_path, "raises")
    assert end.error.startswith("ValueError: made for this test (exit code 1; ")
    assert list(end.found) == ["first"]


def test_a_crash_in_c_leaves_the_stack_of_its_line(tmp_path):
    end = ended(tmp_path, "crashes")
    assert "signal 11" in end.error.splitlines()[0] and "made_check_job.py" in end.error


def test_a_hang_is_ended_with_the_stack_that_it_hangs_in(tmp_path):
    ready = tmp_path / "first.found"
    job, hanging = made("hangs"), task(tmp_path, "hangs")
    limit_s = 4.0
    end = run_job(job, hanging, limit_s=limit_s)
    while not ready.exists() or not ready.read_text():  # a busy machine has not imported everything yet
        limit_s *= 3
        end = run_job(job, hanging, limit_s=limit_s)
    assert f"not finished within {limit_s:.0f} s" in end.error and "_wait_in_vain" in end.error
    assert list(end.found) == ["first"]


def test_a_job_that_the_time_of_the_check_cuts_has_not_hung(tmp_path):
    ready = tmp_path / "first.found"
    left_s = 4.0
    end = run_job(made("hangs"), task(tmp_path, "hangs"), limit_s=HANG_S, left_s=left_s)
    while not ready.exists() or not ready.read_text():
        left_s *= 3
        end = run_job(made("hangs"), task(tmp_path, "hangs"), limit_s=HANG_S, left_s=left_s)
    assert end.is_cut and end.error == "" and list(end.found) == ["first"]


def test_nothing_that_a_job_started_outlives_it(tmp_path):
    process = int(ended(tmp_path, "leaves").found["second"].figures["made/process"])

    def has_ended():
        return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE

    wait_until(has_ended, "a process of the job still runs")


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Run `gpu-check` on made jobs as on a machine with one GPU; return the exit code and the record."""
    device = made("device", lines=(CheckLine("first", "made", "all of it"),))
    monkeypatch.setattr(run, "DEVICE", device)
    monkeypatch.setattr(run, "usable_gpus", lambda: 1)

    def check(*jobs, options=()):
        named = [
            replace(job, lines=tuple(replace(line, name=f"{line.name}") for line in job.lines))
            for job in jobs
        ]
        monkeypatch.setattr(command, "JOBS", (device, *named))
        output = tmp_path / "out"
        code = main(["gpu-check", "--output", str(output), *options])
        return code, json.loads((output / "gpu-check.json").read_text())

    return check


@pytest.mark.slow
def test_a_check_ends_with_0_where_all_holds_and_lists_what_it_skips(checked, capsys):
    code, record = checked(made(""), made("", gpus=2))
    states = [(line["name"], line["state"]) for line in record["lines"]]
    # The made job does not report its second line.
    assert code == 1 and states[1:3] == [("first", "holds"), ("second", "fails")]
    assert states[3:] == [("first", "skipped"), ("second", "skipped")]
    assert record["machine"]["gpu"] == "NVIDIA H100 80GB HBM3" and record["figures"] == {"made/number": 2.0}
    assert "needs 2 GPUs, this machine has 1" in capsys.readouterr().out
    code, record = checked(made("", lines=LINES[:1]), made("", gpus=2))
    assert code == 0


@pytest.mark.slow
def test_one_line_that_does_not_hold_ends_the_check_with_1_and_the_others_run(checked, capsys):
    code, record = checked(made("crashes"), made("wrong"), made("", lines=LINES[:1]))
    assert code == 1
    assert [line["state"] for line in record["lines"]] == [
        "holds",
        "holds",
        "fails",
        "holds",
        "fails",
        "holds",
    ]
    said = capsys.readouterr()
    assert "2 of 6 lines do not hold: second, second" in said.err
    assert "number: 2 >= 3 (made)" in " ".join(said.out.replace("│", " ").split())


def test_what_no_time_is_left_for_is_not_run_and_does_not_fail(checked, capsys, tmp_path):
    code, record = checked(made("", lines=LINES[:1]), options=["--minutes", "0.01"])
    assert code == 4 and [line["state"] for line in record["lines"]] == ["holds", "not run"]
    assert record["lines"][-1]["reason"] == "no time of --minutes was left for it"
    said = " ".join(capsys.readouterr().err.split())
    assert "1 lines hold, 0 skipped; 1 were not run: first; run them alone with `grpo-dist gpu-check" in said
    assert f"--output {tmp_path}/out-rest --only first`, or all with more than --minutes 0.01" in said


def test_lines_of_a_job_that_is_cut_stay_and_the_others_are_not_run(checked, capsys, monkeypatch):
    def cut(job, own, **_):
        end = run_job(job, own, limit_s=HANG_S)
        return end if job is run.DEVICE else replace(end, is_cut=True)

    monkeypatch.setattr(run, "run_job", cut)
    code, record = checked(made(""))
    assert [line["state"] for line in record["lines"]] == ["holds", "holds", "not run"] and code == 4
    assert "the time of --minutes was up after" in record["lines"][-1]["reason"]
    code, _ = checked(made("wrong", lines=(LINES[1], CheckLine("third", "made", ""))))
    assert code == 1
    assert "1 of 3 lines do not hold: second; 1 were not run: third; run" in capsys.readouterr().err


def test_a_device_that_gives_no_figures_is_shown_with_what_it_keeps_from_running(checked, monkeypatch):
    failing = JobEnd({}, "CUDA error: no kernel image", 1.0)
    monkeypatch.setattr(run, "run_job", lambda *_, **__: failing)
    code, record = checked(made("", lines=LINES[1:]), options=["--only", "second"])
    states = [(line["name"], line["state"], line["reason"]) for line in record["lines"]]
    assert code == 1 and states[0] == ("first", "fails", "CUDA error: no kernel image")
    assert states[1][:2] == ("second", "not run") and "`device` found nothing" in states[1][2]


def test_only_names_the_lines_to_run(checked):
    code, record = checked(made("wrong"), options=["--only", "first"])
    assert code == 0 and {line["name"] for line in record["lines"]} == {"first"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "atention"], "did you mean attention?"),
        (["--minutes", "0"], "--minutes 0: expected a number above 0"),
        (["--minutes", "nan"], "--minutes nan: expected a number above 0"),
        (["steps=3"], "steps=3: it takes no settings"),
    ],
)
def test_input_that_cannot_be_used_ends_with_2(capsys, arguments, words):
    assert main(["gpu-check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_a_gpu_one_message_explains_how_to_rehearse(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=r"no NVIDIA GPU here.*grpo-dist gpu-check --rehearse") as refused:
        run_check(CheckOptions(tmp_path / "out"), print)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_plan_reads_the_benchmark_of_a_record(tmp_path, checked):
    from tests.tools.bench.test_bench import result

    checked(made("bench"))
    result().write(tmp_path / "bench.json")
    record = CheckRecord(
        False, {"gpu": "NVIDIA H100"}, {}, bench=json.loads((tmp_path / "bench.json").read_text())
    )
    record.write(tmp_path / "gpu-check.json")
    assert BenchResult.read(tmp_path / "gpu-check.json") == result()
    replace(record, bench=None).write(tmp_path / "gpu-check.json")
    with pytest.raises(UserError, match=r"has no benchmark.*gpu-check --only bench"):
        BenchResult.read(tmp_path / "gpu-check.json")


def test_the_benchmark_of_a_job_is_in_the_record(checked):
    _, record = checked(made("bench"))
    assert record["bench"] == {"schema": 1, "name": "made"}
    assert (record["kind"], record["schema"]) == ("gpu-check", 3)


def test_a_record_has_no_numbers_that_json_lacks(tmp_path):
    found = Findings({"made/nan": math.nan})
    found.at_most("nan", math.inf, 1.0, "made")
    record = CheckRecord(False, {}, {}, lines=[LineRecord("a", "fails", 1.0, found.figures, found.claims)])
    record.write(tmp_path / "record.json")

    def refuse(constant):
        raise AssertionError(constant)

    plain = json.loads((tmp_path / "record.json").read_text(), parse_constant=refuse)
    assert plain["figures"] == {"made/nan": None} and plain["lines"][0]["claims"][0]["value"] is None


def test_the_table_fits_100_columns_and_shows_the_end_of_a_stack():
    found = Findings()
    found.at_most("gradients, packed and padded: relative difference", 0.2, 0.0937, "roundings")
    stack = "not finished within 60 s; its process is in\n" + "\n".join(f"  line {i}" for i in range(20))
    lines = [
        LineRecord("zero1", "fails", 31.0, {}, found.claims),
        LineRecord("head", "fails", 60.0, reason=stack),
    ]
    record = CheckRecord(False, {"gpu": "NVIDIA H100"}, {}, lines=lines)
    console = Console(width=100, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_record(record, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert ": 0.2 <= 0.0937" in text and "line 19" in text and "line 3\n" not in text


def test_no_job_gets_more_time_than_the_check_has_left(tmp_path, checked, monkeypatch):
    limits, real = [], run.run_job

    def recorded(job, own, *, limit_s, left_s):
        limits.append((limit_s, left_s))
        return real(job, own, limit_s=HANG_S)

    monkeypatch.setattr(run, "run_job", recorded)
    checked(made("", limit_s=7.0), made("", limit_s=1e9), options=["--minutes", "30"])
    assert limits[0] == (HANG_S, math.inf)
    assert [limit_s for limit_s, _ in limits[1:]] == [7.0, 1e9]
    assert all(0 < left_s < 30 * 60 for _, left_s in limits[1:])
