"""Runs submitted to a Ray cluster from outside: a real head with a job server and a token."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_dist import __version__
from grpo_dist.config.files import load_config
from grpo_dist.tools.submit import code, ray_jobs
from grpo_dist.tools.submit.job import Job
from tests.support.patience import HANG_S, wait_until
from tests.support.submissions import command, config_in, health, ray_head

pytestmark = [pytest.mark.machine, pytest.mark.long]

# Replaces the driver: prints its location and arguments, waits for a stop, and ends cleanly.
DRIVER = """
import json, os, pathlib, signal, sys, time
import grpo_dist
from grpo_dist import __version__
from grpo_dist.config.files import load_config
import ray
config = load_config("config.yaml")
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
told = {
    "code": grpo_dist.__file__, "here": os.getcwd(), "run": config.output_dir, "steps": config.steps,
    "variable": os.environ.get("MY_VARIABLE"),
    "files": sorted(path.name for path in pathlib.Path("rewards").iterdir()),
    "head": "node:__internal_head__" in ray.nodes()[0]["Resources"],
}
def ended(number, frame):
    time.sleep(4)  # longer than Ray waits
    print("checkpoint saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, ended)
print("DRIVER", json.dumps(told), flush=True)
pathlib.Path(config.output_dir, "begun").touch()
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Make a current directory with reward code, and with data and results that must not be uploaded."""
    rewards = tmp_path / "rewards"
    (rewards / "checkpoints").mkdir(parents=True)
    (rewards / "driver.py").write_text(DRIVER)
    (rewards / "problems.jsonl").write_text("{}\n")
    (rewards / "checkpoints/weights.txt").write_text("x")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


# Imports Ray once, and forks a process for each command: Ray reads its token once per process.
_COMMANDS = """
import json, os, sys
import ray.job_submission
from grpo_dist.cli import main
from grpo_dist.tools.submit import ray_jobs
ray_jobs._ENTRYPOINT = os.environ.get("TEST_ENTRYPOINT", ray_jobs._ENTRYPOINT)
for line in sys.stdin:
    arguments, environment, path = json.loads(line)
    if (child := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.environ.update(environment)
        sys.exit(main(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def outside(tmp_path_factory):
    """Return a function that runs a command in a forked process, and returns exit status and output."""
    place, count, parents = tmp_path_factory.mktemp("outputs"), itertools.count(), []

    def run(*arguments, **environment):
        if not parents:  # with the variables of the first command
            command = [sys.executable, "-c", _COMMANDS]
            parents.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        output = place / str(next(count))
        parents[0].stdin.write(json.dumps([[*map(str, arguments)], environment, str(output)]) + "\n")
        parents[0].stdin.flush()
        return int(parents[0].stdout.readline()), output.read_text()

    yield run
    for parent in parents:
        parent.stdin.close()
        parent.wait(HANG_S)


@pytest.mark.slow
def test_a_run_is_submitted_followed_refused_twice_stopped_and_resumed(project, monkeypatch, outside):
    monkeypatch.setenv("MY_VARIABLE", "of-mine-alone")
    monkeypatch.setenv("TEST_ENTRYPOINT", "python rewards/driver.py")
    path, run = config_in(project), project / "runs/tiny"
    submit = ("submit", path, "--to", "ray", "--env", "MY_VARIABLE", "code_paths=[rewards]")
    with ray_head(project) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        variables = environment | {"RAY_ADDRESS": environment["GCS_ADDRESS"]}
        # The check waits 25 s for Ray; a container repeats it.
        wait_until(lambda: health(**variables) == 0, "unhealthy")
        status, output = outside(*submit)
        assert status == 0, output
        job = json.loads((run / "submitted.json").read_text())["job"]
        assert job == f"{Job(load_config(path), path, ()).name}-1"
        assert "of-mine-alone" not in output + (run / "submitted.json").read_text()

        printed = driver_report(run, outside)
        # The uploaded code, not the installed one.
        assert Path(printed["code"]).is_relative_to(printed["here"])
        assert (printed["steps"], printed["run"]) == (2, str(project / "runs"))
        assert (printed["variable"], printed["head"]) == ("of-mine-alone", True)
        assert printed["files"] == ["driver.py"]
        assert "RUNNING" in outside("status", run)[1]

        status, output = outside(*submit)
        assert status == 2
        assert f"its job {job} is RUNNING; end it with `grpo-dist stop {run}`" in output

        assert outside("stop", run)[0] == 0
        # It ends with the job, which had time to save its checkpoint.
        assert "checkpoint saved" in outside("logs", "--follow", run)[1]
        wait_until(lambda: "STOPPED" in outside("status", run)[1], "not stopped")
        assert "is over: STOPPED" in outside("stop", run)[1]

        (run / "submitted.json").unlink()  # as on another machine
        assert outside(*submit)[0] == 0
        assert json.loads((run / "submitted.json").read_text())["job"] == f"{job[:-2]}-2"
        assert driver_report(run, outside)["run"] == printed["run"]
        outside("stop", run)
        outside("logs", "--follow", run)
        wait_until(lambda: "STOPPED" in outside("status", run)[1], "not stopped")

        status, output = outside("status", run, RAY_AUTH_TOKEN="0" * 32)
        assert status == 2 and "token" in output.lower()


def driver_report(run, outside):
    """Wait for the driver's mark, because every command imports Ray; return what the driver printed."""
    mark = run.parent / "begun"
    wait_until(mark.exists, lambda: str(outside("status", run)))
    mark.unlink()
    text = wait_until(
        lambda: "DRIVER " in (log := outside("logs", run)[1]) and log, "the driver's line is not in its log"
    )
    (line,) = [line for line in text.splitlines() if line.startswith("DRIVER ")]
    return json.loads(line.removeprefix("DRIVER "))


def dry_run(capsys, directory, *arguments):
    return command(capsys, "submit", config_in(directory), "--to", "ray", "--dry-run", *arguments)


def test_a_dry_run_shows_the_request_and_no_secret(project, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k-secret")
    variables = ("--env", "WANDB_API_KEY", "--env", "HF_HOME=/shared/hf")
    status, output = dry_run(capsys, project, *variables, "steps=5", "checkpoint.grace_s=200")
    assert status == 0 and "k-secret" not in output
    request, config = output.split("\n# config.yaml\n")
    job = yaml.safe_load(request)
    assert job["runtime_env"]["env_vars"] == {
        "WANDB_API_KEY": "***", "HF_HOME": "/shared/hf", "RAY_JOB_STOP_WAIT_TIME_S": "230",
    }  # fmt: skip
    assert job["entrypoint"] == "python -m grpo_dist.cli train config.yaml"
    assert job["entrypoint_num_cpus"] == 1
    assert job["entrypoint_resources"] == {"node:__internal_head__": 0.001}
    assert job["metadata"]["run"] == str(project / "runs/tiny")
    assert yaml.safe_load(config)["steps"] == 5
    assert not (project / "runs/tiny").exists()


def test_the_code_is_uploaded_and_loads_as_the_same_configuration(project):
    path = config_in(project)
    config = load_config(path, ["code_paths=[rewards]", "cluster.address=10.0.0.1:6379"])
    into = project / "carried"
    into.mkdir()
    carried = code.gather(config, into, ray_jobs.runtime_env()["excludes"])
    expected = {"grpo_dist/cli.py", "actors/transfer/vllm_plugin.py", "rewards/driver.py", "config.yaml"}
    assert expected <= set(carried.files)
    assert {Path(name).parts[0] for name in carried.files} == {
        "grpo_dist", "actors", "rewards", "config.yaml", f"grpo_dist-{__version__}.dist-info",
    }  # fmt: skip
    assert [name for name in carried.files if name.startswith("rewards/")] == ["rewards/driver.py"]
    assert not [name for name in carried.files if name.endswith(".pyc")]
    there = load_config(into / "config.yaml")
    assert there.cluster.address is None
    assert there.model_copy(update={"cluster": config.cluster}) == config


@pytest.mark.parametrize("output", ["experiments", "nested/experiments", "/shared/experiments"])
def test_only_the_output_directory_itself_and_the_named_excludes_stay(project, output):
    stays = not output.startswith("/")
    directory = output if stays else "experiments"
    (project / directory).mkdir(parents=True)
    (project / directory / "reward.py").write_text("")
    config = load_config(config_in(project, output=output), ["code_paths=[., rewards]"])
    (project / "carried").mkdir()
    carried = code.gather(config, project / "carried", ray_jobs.runtime_env()["excludes"])
    assert (f"{directory}/reward.py" in carried.files) is not stays
    assert carried.notices() == [
        *([f"left out: {output} (`output_dir`)"] if stays else []),
        "left out: rewards/problems.jsonl (excluded by *.jsonl)",
        "left out: runs (excluded by /runs/)",
        "left out: rewards/checkpoints (excluded by checkpoints/)",
    ]


def test_a_job_submitted_by_hand_uploads_all_code_and_no_outputs():
    from ray._private.runtime_env.packaging import _get_excludes

    root = Path(__file__).resolve().parents[3]
    stays = _get_excludes(root, ray_jobs.runtime_env()["excludes"])
    code_of_ours = [p for name in ("grpo_dist", "actors", "configs") for p in (root / name).rglob("*.*")]
    not_code = {"__pycache__", "pictures"}  # a run does not need the pictures of the guides
    assert not [p for p in code_of_ours if p.is_file() and not not_code & set(p.parts) and stays(p)]
    outputs = ("runs/demo/metrics.jsonl", ".git/config", ".venv/bin/python", "data/train.txt")
    for path in (*outputs, "m/model.safetensors"):
        assert stays(root / path)


def test_the_engines_find_the_plug_in_where_only_the_code_is(project):
    import tomllib

    root = Path(__file__).resolve().parents[3]
    project_table = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    plugins = project_table["entry-points"]["vllm.general_plugins"]
    group, *lines = code._METADATA["entry_points.txt"].splitlines()
    assert group == "[vllm.general_plugins]"
    assert dict(line.split(" = ") for line in lines) == plugins


def test_an_upload_that_is_too_large_is_refused_before_it_starts(project, capsys):
    (project / "rewards/big.txt").write_bytes(b"")
    os.truncate(project / "rewards/big.txt", 101 * 2**20)
    status, output = dry_run(capsys, project, "code_paths=[rewards]")
    assert status == 2
    assert "MiB would travel with the job" in output and "rewards/big.txt (101.0 MiB)" in output


def test_neither_keys_nor_targets_of_outside_links_are_uploaded(project, capsys):
    rewards, outside = project / "rewards", project / "elsewhere"
    outside.mkdir()
    (outside / "private.py").write_text("SESAME")
    for name in ("id_rsa", "server.pem", ".env", ".netrc", "credentials", "kubeconfig", "Secrets.YAML"):
        (rewards / name).write_text("SESAME")
    (rewards / "deploy").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nSESAME\n")
    (rewards / ".ssh").mkdir()
    (rewards / ".ssh/config").write_text("SESAME")
    (rewards / "out.py").symlink_to(outside / "private.py")
    (rewards / "out").symlink_to(outside)
    (rewards / "key.txt").symlink_to("id_rsa")
    (rewards / "loop").symlink_to(".")
    os.mkfifo(rewards / "pipe")
    (rewards / "same.py").symlink_to("driver.py")
    (rewards / "credentials.py").write_text("")  # a module
    config = load_config(config_in(project), ["code_paths=[rewards]"])
    (project / "carried").mkdir()
    carried = code.gather(config, project / "carried", ray_jobs.runtime_env()["excludes"])
    reward_files = {name for name in carried.files if name.startswith("rewards/")}
    assert reward_files == {"rewards/driver.py", "rewards/same.py", "rewards/credentials.py"}
    assert not [p for p in (project / "carried").rglob("*") if p.is_file() and b"SESAME" in p.read_bytes()]
    status, output = dry_run(capsys, project, "code_paths=[rewards]")
    assert status == 0
    for line in (
        "id_rsa (its name looks like a key)", ".env (its name looks like a key)", "deploy (a private key)",
        "out.py (a link that leads out of its directory)", "key.txt (its name looks like a key)",
        "loop (a link to a directory that it is in)", "pipe (neither a file nor a directory)",
    ):  # fmt: skip
        assert f"\n# left out: rewards/{line}\n" in output
    yaml.safe_load(output.partition("\n# config.yaml\n")[0])


def test_a_code_directory_that_links_outside_is_refused(project, capsys, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (project / "linked").symlink_to(other)
    status, output = dry_run(capsys, project, "code_paths=[linked]")
    assert status == 2 and "linked is outside of the current directory" in output


def test_a_code_directory_that_cannot_be_read_is_refused(project, capsys, monkeypatch):
    """Its files would silently be missing on the cluster."""
    (project / "rewards/closed").mkdir()
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    status, output = dry_run(capsys, project, "code_paths=[rewards]")
    assert status == 2 and "rewards/closed cannot be read (Permission denied)" in output


def test_by_hand_keys_are_not_uploaded_either():
    excludes = ray_jobs.runtime_env()["excludes"]
    assert [name for name in code.KEYS if name not in excludes and not name.startswith(".")] == []


@pytest.mark.parametrize(("arguments", "words"), [
    (("output_dir=runs",), "`output_dir` = runs is relative"),
    (("data.train.0.path=here.jsonl",), "`data.train.0.path` = here.jsonl is on this machine"),
    (("model.path=rewards@latest",), "`model.path` = rewards@latest is on this machine"),
    (("distillation={coef: 0.5, teachers: [{name: t, model: rewards@2}]}",),
     "`distillation.teachers.0.model` = rewards@2 is on this machine"),
    (("distillation={coef: 0.5, teachers: [{name: t, model: rewards}]}",),
     "`distillation.teachers.0.model` = rewards is on this machine"),
    (("demonstrations={data: here.jsonl, coef: 0.1}",),
     "`demonstrations.data.0.path` = here.jsonl is on this machine"),
    (("environments.python=rewards",), "`environments.python` = rewards is on this machine"),
    (("code_paths=[../elsewhere]",), "is outside of the current directory"),
    (("code_paths=[nowhere]",), "nowhere: no such directory in "),
    (("checkpoint.resume=never",), "`checkpoint.resume` = never"),
    (("steps=none",), "steps"),
    (("rewards.functions=[{function: maths}]",), "rewards.functions: reward function 'maths': expected"),
    (("algorithm.advantage=maxrl", "rewards.functions=[{function: cosine_length}]"),
     "needs a reward of 0 and 1, but `cosine_length` has other values"),
    (("--env", "NOT_SET_HERE"), "--env NOT_SET_HERE: not set here"),
    (("--env", "HF_TOKEN=hf_123"), "--env HF_TOKEN=***: looks like a secret"),
    (("--driver-cpus", "nan"), "--driver-cpus nan: expected 0 to"),
    (("--driver-cpus", "-1"), "--driver-cpus -1: expected 0 to"),
    (("--driver-cpus", "inf"), "--driver-cpus inf: expected 0 to"),
    (("--image", "x"), "--image is not an option of --to ray"),
    ((), "no cluster; give --address http://HEAD:8265"),
    (("--address", "10.0.0.1:6379"), "10.0.0.1:6379 is not the address of a job server"),
    (("--address", "http://127.0.0.1:1"), "no Ray job server answers there"),
    (('rewards.functions=[{function: math, kwargs: {api_key: "k-1"}}]',),
     "`rewards.functions.0.kwargs.api_key` looks like a secret"),
    (("rewards.functions=[{function: judge, kwargs: {extra_body: {key: k-1}}}]",), "looks like a secret"),
    (("steps.api_key=k-1", "steps=3"), "override steps.api_key=*** looks like a secret"),
    (("output_dir=/data/../etc",), "`output_dir` = /data/../etc contains `..`"),
    (("--env", "BASIC_AUTH=k-1"), "--env BASIC_AUTH=***: looks like a secret"),
])  # fmt: skip
def test_a_submission_that_cannot_work_is_refused_in_one_message(project, capsys, arguments, words):
    (project / "here.jsonl").write_text('{"problem": "1", "answer": "1"}\n')
    status, output = command(capsys, "submit", config_in(project), "--to", "ray", *arguments)
    assert status == 2
    assert words in output and output.count("error:") == 1
    assert "k-1" not in output and "hf_123" not in output
    assert not (project / "runs/tiny").exists()


def test_status_accepts_a_run_directory_with_any_name(tmp_path, capsys):
    status, output = command(capsys, "status", tmp_path / "\udcff")
    assert status == 2 and "nothing was submitted for this run directory" in output


def test_a_run_that_is_complete_is_not_submitted_again(project, capsys):
    (project / "runs/tiny").mkdir()
    (project / "runs/tiny/DONE").write_text("2\n")
    status, output = dry_run(capsys, project)
    assert status == 2 and "the run is complete (2 steps)" in output
    assert dry_run(capsys, project, "epochs=2")[0] == 0  # `steps` is not read


@pytest.mark.slow
def test_a_whole_run_trains_as_a_job(project, monkeypatch, outside):
    with ray_head(project) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        path, run = config_in(project), project / "runs/tiny"
        status, output = outside("submit", path, "--to", "ray")
        assert status == 0, output
        output = outside("logs", "--follow", run)[1]
        wait_until(lambda: "SUCCEEDED" in outside("status", run)[1], output)
        assert (run / "DONE").read_text() == "2\n"
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
        status, output = outside("submit", path, "--to", "ray")
        assert status == 2 and "the run is complete" in output
