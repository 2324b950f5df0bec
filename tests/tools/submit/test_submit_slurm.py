"""Runs submitted to Slurm: the rendered script, with fakes of Slurm's programs on this machine.
`test_submit_real_slurm.py` has whole runs under a real Slurm.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.tools.submit.job import SubmissionRecord
from grpo_dist.tools.submit.slurm_jobs import check_time
from tests.support.patience import HANG_S, wait_until
from tests.support.submissions import BIN, PROGRAMS, PYTHON, RAY, Running, command, config_in

pytestmark = [pytest.mark.machine, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
JUDGE = "rewards.functions=[{function: judge, kwargs: {extra_body: {api_key: k-1}}}]"
TEMPLATE = ROOT / "launch/slurm.sbatch"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put fake programs first on the path; return the directory of the files that they write."""
    programs, notes = tmp_path / "bin", tmp_path / "notes"
    programs.mkdir(), notes.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (notes / "job").write_text("JobId=4711 JobState=RUNNING Reason=None PreemptTime=None")
    monkeypatch.setenv("PATH", f"{programs}:{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STAND_IN", str(notes))
    monkeypatch.chdir(tmp_path)
    return notes


def submit(capsys, directory, *arguments):
    path = config_in(directory)
    return command(capsys, "submit", path, "--to", "slurm", "--gpus-per-node", "0", *arguments)


def calls(notes):
    return (notes / "calls").read_text().splitlines() if (notes / "calls").exists() else []


@pytest.fixture
def without_ray(tmp_path, slurm):
    for name, text in {"ray": RAY, "python": PYTHON.replace("REAL", sys.executable)}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def make(*arguments, **options):
        jobs.append(Running(tmp_path, *arguments, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


@pytest.mark.slow
def test_by_hand_the_template_forwards_its_arguments_and_a_stop_is_final(slurm, tmp_path, start):
    number = f"{os.getpid()}1"
    Path(f"/tmp/ray-{number}-0").mkdir()  # a killed attempt left it
    job = start(TEMPLATE.read_text(), "configs/my.yaml", "steps=3", nodes=1, number=number)
    assert job.driver()["arguments"] == ["train", "configs/my.yaml", "steps=3"]
    job.process.send_signal(signal.SIGUSR2)
    assert job.end() == 75
    assert "checkpoint saved" in job.said()
    assert not [call for call in calls(slurm) if "requeue" in call or call.startswith("srun")]


@pytest.mark.parametrize(("state", "again"), [
    ("JobState=RUNNING PreemptTime=None", True),  # a partition with a grace time
    ("JobState=COMPLETING PreemptTime=2026-01-02T03:04:05", True),
    ("JobState=COMPLETING PreemptTime=None", False),  # scancel
    ("JobState=CANCELLED PreemptTime=None", False),
])  # fmt: skip
def test_a_job_resumes_after_preemption_and_not_after_scancel(
    slurm, without_ray, tmp_path, start, state, again
):
    (slurm / "job").write_text(f"JobId=1 {state} EndTime=2026")
    job = start(TEMPLATE.read_text(), "my.yaml", nodes=1)
    job.driver()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75
    assert (f"scontrol requeue {job.job}" in calls(slurm)) is again


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [("0", "0", False), ("3", "0", False), ("75", "0", True), ("75", "100", False)],
)
def test_only_a_run_that_will_resume_is_requeued(slurm, without_ray, tmp_path, start, code, restarts, again):
    job = start(
        TEMPLATE.read_text(), "my.yaml", nodes=1, DRIVER_S="0", DRIVER_CODE=code, SLURM_RESTART_COUNT=restarts
    )
    assert job.end() == int(code)
    assert ("scontrol requeue" in " ".join(calls(slurm))) is again


def test_a_head_that_does_not_start_is_retried(slurm, without_ray, tmp_path, start):
    (slurm / "ray-fails").touch()
    job = start(TEMPLATE.read_text(), "my.yaml", nodes=1, DRIVER_S="0")
    assert job.end() == 0
    assert "has not started (try 1 of 3): port in use" in job.said() and "DRIVER" in job.said()


def test_a_node_that_does_not_start_is_retried_until_the_job_ends(slurm, without_ray, tmp_path, start):
    options_end = 'until [[ $1 == bash ]]; do shift; done; exec "$@"'
    srun = f'#!/usr/bin/env bash\ntouch "$SLURM_STAND_IN/ray-fails"\n{options_end}\n'
    (tmp_path / "bin/srun").write_text(srun)
    job = start(TEMPLATE.read_text(), "my.yaml")

    def tries():
        return len(
            [call for call in calls(slurm) if call.startswith("ray ") and "--address=stand-in" in call]
        )

    wait_until(lambda: tries() == 2, job.said)
    job.driver()
    job.process.send_signal(signal.SIGUSR2)
    assert job.end() == 75
    assert "exit code 1 (try 1 of 3)" in job.said() and tries() == 2


def test_a_setup_script_may_read_unset_variables_and_take_long(slurm, without_ray, tmp_path, start):
    text = TEMPLATE.read_text().replace(
        "prepare() { :; }", 'prepare() { MINE="a$NOT_SET_HERE"; SECONDS=700; }'
    )
    job = start(text, "my.yaml", nodes=1, DRIVER_S="0")
    assert job.end() == 0, job.said()


@pytest.mark.slow
def test_missing_nodes_end_the_job_by_the_deadline_and_leave_no_process(slurm, tmp_path, start):
    job = start(TEMPLATE.read_text().replace('--within "$nodes_deadline_s"', "--within 4"), "my.yaml")
    assert job.end() == 1
    assert "1 of 2 nodes have joined within" in job.said() and "DRIVER" not in job.said()


def test_a_job_is_submitted_once_followed_and_stopped(slurm, tmp_path, capsys):
    status, text = submit(capsys, tmp_path, "--sbatch=--partition=gpu", "--time", "01:00:00")
    assert status == 0, text
    run = tmp_path / "runs/tiny"
    record = json.loads((run / "submitted.json").read_text())
    assert (record["job"], record["log"]) == ("4711", str(run / "slurm-4711.log"))
    script = (slurm / "script").read_text()
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = ("--nodes=1", "--time=01:00:00", "--signal=B:USR1@180", "--requeue", "--dependency=singleton")
    for option in (*options, f"--output={run}/slurm-%j.log", f"--chdir={tmp_path}"):
        assert f"#SBATCH {option}" in directives
    assert directives[0] == "#SBATCH --partition=gpu"  # the directives of submit follow, and win
    # sbatch reads no directive after the first command.
    first = next(i for i, line in enumerate(script.splitlines()) if line and not line.startswith("#"))
    assert not [line for line in script.splitlines()[first:] if line.startswith("#SBATCH")]

    (slurm / "queue").write_text("4711")
    status, text = submit(capsys, tmp_path)
    assert status == 2 and "its job 4711 is pending or running" in text

    (slurm / "queue").write_text("PENDING|0:00|(Resources)")
    text = command(capsys, "status", run)[1]
    assert "4711 on slurm" in text and "PENDING, 0:00 (Resources)" in text
    command(capsys, "stop", run)
    assert calls(slurm)[-1] == "scancel 4711"
    (slurm / "queue").write_text("RUNNING|1:00|node1")
    command(capsys, "stop", run)
    assert calls(slurm)[-1] == "scancel --signal=USR2 --batch 4711"

    (run / "slurm-4711.log").write_text("step 1\n")
    following = subprocess.Popen(
        [sys.executable, "-m", "grpo_dist.cli", "logs", "--follow", run],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert following.stdout.readline() == "step 1\n"
    with (run / "slurm-4711.log").open("a") as log:
        log.write("step 2\n")
    assert following.stdout.readline() == "step 2\n"
    (slurm / "queue").unlink()
    assert following.wait(HANG_S) == 0
    assert "COMPLETED, exit code 0" in command(capsys, "status", run)[1]
    (slurm / "no-accounting").touch()
    assert "over; squeue and sacct no longer know" in command(capsys, "status", run)[1]


def test_a_job_is_not_over_because_the_controller_does_not_answer(slurm, tmp_path, capsys):
    SubmissionRecord("slurm", "4711", str(tmp_path / "runs/tiny")).write()
    error = slurm / "squeue-fails"
    error.write_text("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    for what in ("status", "stop"):
        status, output = command(capsys, what, tmp_path / "runs/tiny")
        assert status == 2 and "Unable to contact slurm controller" in output
    error.write_text("slurm_load_jobs error: Invalid job id specified")
    assert "COMPLETED, exit code 0" in command(capsys, "status", tmp_path / "runs/tiny")[1]


@pytest.mark.parametrize(("arguments", "words"), [
    (("rollout.num_workers=99", "--nodes", "1"), "`rollout.num_workers` = 99"),
    (("--sbatch=partition",), "--sbatch=partition: expected an option"),
    (("rewards.models=[]", "+algorithm=nope"), "expected +algorithm=NAME with NAME one of"),
    (("--image", "x"), "--image is not an option of --to slurm"),
    (("sft.api_key=k-1",), "sft"),
    (('output_dir="/tmp/a\\ntouch pwned"',), "`output_dir` = '/tmp/a\\ntouch pwned' has a line break"),
    (('output_dir="/tmp/a\\Ltouch pwned"',), "has a line break"),
    (("output_dir=/tmp/a\\b",), "has a backslash"),
    (("--time", "1:00\ntouch pwned"), "--time '1:00\\ntouch pwned': expected a limit"),
    (("--time", "$(touch pwned)"), "--time '$(touch pwned)': expected a limit"),
    (("--time", "2"), "the run is asked to end 180 s before the limit (`checkpoint.grace_s` + 120)"),
    (("--time", "9:59"), "--time 9:59: the run is asked to end 180 s before the limit"),
    (("--time", "0-0:9"), "give at least 10 minutes"),
    (("--time", "20", "checkpoint.grace_s=900"), "give at least 24 minutes"),
    (("--sbatch=--job-name=mine",), "submit decides --job-name; use its own options"),
    (("--sbatch=--partition=gpu --no-requeue",), "submit decides --no-requeue"),
    (("--sbatch=--array=0-3",), "submit decides --array"),
    (("--sbatch=-a 0-3",), "submit decides --array"),
    (("--sbatch=--arr=0-3",), "submit decides --array"),
    (("--sbatch=--partition=gpu -M other",), "submit decides --clusters"),
    (("--sbatch=-ex.log",), "submit decides --error"),
    (("--after", "runs/other"), "--after runs/other: no job was submitted to Slurm for this run"),
    (("--sbatch=--signal=TERM@30",), "submit decides --signal"),
    (("--sbatch=--comment=a\rtouch pwned",), "--sbatch = '--comment=a\\rtouch pwned' has a line break"),
    (("--sbatch=--export=ALL,HF_TOKEN=k-1",), "--sbatch=--export=ALL,HF_TOKEN=*** looks like a secret"),
    (("--setup", "export HF_TOKEN=k-1"), "--setup=export HF_TOKEN=*** looks like a secret"),
    (("--env", "HF TOKEN=k-1"), "--env HF TOKEN=***: expected NAME"),
    ((JUDGE, "rewards.functions=[{function: math}]"), "override rewards.functions=[{function: judge"),
    ((JUDGE,), "rewards.functions.0.kwargs.extra_body.api_key` looks like a secret"),
])  # fmt: skip
def test_a_job_that_cannot_work_is_not_submitted(slurm, tmp_path, capsys, arguments, words):
    status, output = submit(capsys, tmp_path, *arguments)
    assert status == 2 and words in output and output.count("error:") == 1 and "k-1" not in output
    assert not calls(slurm) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "limit", ["0", "UNLIMITED", "infinite", "10", "10:00", "0:10:00", "1-0", "0-1", "0-0:10", "7-00:00:00"]
)
def test_a_time_limit_that_leaves_time_to_train_is_accepted(limit):
    check_time(limit, grace_s=60)


@pytest.mark.parametrize(("value", "status"), [("", 0), (None, 1)])
def test_a_hidden_variable_may_be_empty_but_must_be_set(slurm, tmp_path, capsys, monkeypatch, value, status):
    monkeypatch.setenv("SUBMITTED_OPTION", "")
    code, output = submit(capsys, tmp_path, "--env", "SUBMITTED_OPTION", "--dry-run")
    assert code == 0, output
    prepare = output[output.index("prepare() {") : output.index("train=(")] + "prepare\n"
    environment = {"PATH": os.environ["PATH"]} | ({} if value is None else {"SUBMITTED_OPTION": value})
    shell = subprocess.run(
        ["bash", "-c", prepare], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert bool(shell.returncode) == bool(status) and ("was not set there" in shell.stderr) == bool(status)


def test_a_secret_in_the_file_is_not_submitted(slurm, tmp_path, capsys):
    path = config_in(tmp_path)
    path.write_text(path.read_text() + JUDGE.replace("rewards.functions=", "rewards: {functions: ") + "}\n")
    status, output = command(capsys, "submit", path, "--to", "slurm", "--gpus-per-node", "0")
    assert status == 2 and "extra_body.api_key` looks like a secret" in output and "k-1" not in output
    assert not calls(slurm)


def test_a_line_break_in_the_current_directory_is_refused(slurm, tmp_path, capsys, monkeypatch):
    (tmp_path / "a\ntouch pwned").mkdir()
    monkeypatch.chdir(tmp_path / "a\ntouch pwned")
    status, output = submit(capsys, tmp_path)
    assert status == 2 and "the current directory = " in output and not calls(slurm)


HOSTILE = "a'b\"c $(touch pwned) `touch pwned` ; touch pwned # %j"


@pytest.mark.usefixtures("slurm", "without_ray")
def test_no_value_of_a_submission_is_run_as_a_command(tmp_path, capsys, start, monkeypatch):
    place = tmp_path / HOSTILE
    place.mkdir()
    monkeypatch.chdir(place)
    path = config_in(tmp_path, output=tmp_path / "runs")
    path.write_text(path.read_text().replace(f"{tmp_path}/runs", json.dumps(f"{place}/runs")))
    path = path.rename(place / "tiny.yaml")
    broken = f"x\ntouch pwned\n{HOSTILE}\n}}\ntouch pwned"
    status, script = command(
        capsys, "submit", path, "--to", "slurm", "--gpus-per-node", "0", "--dry-run",
        f"--env=GIVEN={broken}", f"data.instruction={json.dumps(broken)}", f"--sbatch=--comment={HOSTILE}",
    )  # fmt: skip
    assert status == 0, script
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    output = next(line for line in directives if line.startswith("#SBATCH --output="))
    assert shlex.split(output)[1] == f"--output={place}/runs/tiny".replace("%", "%%") + "/slurm-%j.log"
    job = start(script, nodes=1, DRIVER_S="0")
    driver = job.driver()
    assert job.end() == 0, job.said()
    assert driver["variable"] == broken and driver["arguments"][:2] == ["train", str(path)]
    assert (driver["auth"], driver["token"]) == ("token", 64)
    assert f"data.instruction={json.dumps(broken)}" in driver["arguments"]
    assert not list(tmp_path.rglob("pwned"))


def test_the_fewest_sufficient_nodes_are_requested(slurm, tmp_path, capsys):
    path = config_in(tmp_path)
    gpus = ("--to", "slurm", "--gpus-per-node", "8", "--dry-run", "batch.prompts_per_step=12")
    gpus += ("max_staleness=1", "policy.num_workers=12", "rollout.num_workers=2",
             "rollout.tensor_parallel_size=4")  # fmt: skip
    status, output = command(capsys, "submit", path, *gpus)
    assert status == 0 and "#SBATCH --nodes=3\n" in output, output
    assert "#SBATCH --gpus-per-node=8\n" in output and "#SBATCH --cpus-per-task=64\n" in output
    status, output = command(capsys, "submit", path, *gpus, "--nodes", "2")
    assert status == 2 and "20 GPUs are needed" in output
    # 10 engines of 4 GPUs take a node of 6 each; 12 ranks get the remaining GPUs.
    others = ("--to", "slurm", "--gpus-per-node", "6", *gpus[4:], "rollout.num_workers=10")
    status, output = command(capsys, "submit", path, *others)
    assert status == 0 and "#SBATCH --nodes=10\n" in output, output
    # Four evaluation engines of 8 GPUs take a node each, the other engine and the rank two more.
    engines = (*gpus[:6], "rollout.tensor_parallel_size=8", "max_staleness=1", "evaluation.num_workers=4",
               "evaluation.every=1", "data.eval=[{path: 'demo:add3'}]")  # fmt: skip
    status, output = command(capsys, "submit", path, *engines)
    assert status == 0 and "#SBATCH --nodes=6\n" in output, output
    # There are 8 GPUs, but an engine of 3 needs them on one node.
    wide = (*gpus[:2], "--gpus-per-node", "2", "rollout.tensor_parallel_size=3", "max_staleness=1")
    status, output = command(capsys, "submit", path, *wide, "--nodes", "4")
    assert status == 2 and "4 node(s) with 2 GPU(s) and 16 CPU(s) each have no room" in output


def test_the_template_itself_is_a_valid_script():
    assert subprocess.run(["bash", "-n", TEMPLATE], timeout=HANG_S).returncode == 0
    text = TEMPLATE.read_text()
    assert text.count("# >>> settings\n") == text.count("# <<< settings\n") == 1
