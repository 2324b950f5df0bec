"""Images and launch files are linted, pinned and small, and their installation steps are tested."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.patience import HANG_S, wait_until
from tests.support.processes import free_port
from tests.support.submissions import BIN, health

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = [ROOT / "docker/Dockerfile", ROOT / "docker/Dockerfile.cpu"]
SCRIPTS = [
    ROOT / "launch/setup.sh", ROOT / "launch/slurm.sbatch", ROOT / "docker/healthcheck.sh", ROOT / ".ci/run",
]  # fmt: skip


def linter(name):
    path = shutil.which(name, path=f"{BIN}:{os.environ['PATH']}")
    assert path, f"{name} comes with the extra `dev`: make setup"
    return path


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_hadolint_finds_nothing(path):
    done = subprocess.run([linter("hadolint"), path], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout


def test_shellcheck_finds_nothing():
    done = subprocess.run([linter("shellcheck"), *SCRIPTS], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout


def instructions(path):
    """Return (word, rest) of each instruction, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_pinned_and_staged_and_run_without_root(path):
    steps = instructions(path)
    outside = [rest for word, rest in steps if word == "FROM" and not rest.startswith("base")]
    assert len(outside) == 1 and re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64} AS base", outside[0])
    assert [rest for word, rest in steps if word == "FROM"][1:] == ["base AS build", "base"]
    last = dict(steps[max(i for i, (word, _) in enumerate(steps) if word == "FROM") :])
    assert last["USER"] == "10001:10001"  # a number, so Kubernetes sees that it is not root
    assert "docker/healthcheck.sh" in last["HEALTHCHECK"]
    assert last["COPY"].startswith("--from=build ")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_installed_by_the_tested_script(path):
    (step,) = [rest for word, rest in instructions(path) if word == "RUN" and "setup.sh" in rest]
    words = [word for word in step.split() if not word.startswith("--mount=")]
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    assert words[len(settings) :] == ["bash", "launch/setup.sh"]
    assert settings["EXTRA"] == {"Dockerfile": "gpu", "Dockerfile.cpu": "cpu"}[path.name]
    pinned = (ROOT / f"docker/constraints-{settings['EXTRA']}.txt").read_text().splitlines()
    assert len(pinned) > 100
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in pinned if line[0] != "#")


def test_the_build_context_has_only_what_the_image_needs(tmp_path):
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    names = [line[1:] for line in lines if line.startswith("!")]
    assert lines[0] == "*"
    size = 0
    for name in names:
        path = ROOT / name
        files = [path] if path.is_file() else [f for f in path.rglob("*") if "__pycache__" not in f.parts]
        assert path.exists()
        size += sum(f.stat().st_size for f in files if f.is_file())
    assert size < 5 * 2**20
    assert {"launch", "docker", "grpo_dist", "actors", "pyproject.toml", "README.md", "LICENSE"} <= set(names)


def test_compose_has_a_head_and_workers_that_wait_for_it():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    head, worker = services["head"], services["worker"]
    assert head["ports"] == ["127.0.0.1:8265:8265"]  # the job server, local only
    assert "ports" not in worker and "container_name" not in worker  # so that it can be scaled
    assert worker["depends_on"] == {"head": {"condition": "service_healthy"}}
    for node in (head, worker):
        assert node["environment"]["RAY_AUTH_MODE"] == "token"
        assert node["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert node["shm_size"] and node["init"]
        assert set(node["volumes"]) == {"runs:/runs", "cache:/home/grpo/.cache"}


def test_the_health_check_looks_behind_an_init_at_its_program(tmp_path):
    """`docker run --init` starts a process named after its file."""
    init = tmp_path / "tini"
    init.write_bytes(Path(shutil.which("bash")).read_bytes())
    init.chmod(0o755)
    with subprocess.Popen([init, "-c", "sleep 60; true"]) as first:
        try:
            wait_until(psutil.Process(first.pid).children, "its program does not start")
            (program,) = psutil.Process(first.pid).children()
            assert health(first.pid) == 0
            program.suspend()
            wait_until(lambda: health(first.pid) != 0, "a stopped program passes for a healthy one")
            program.kill()
        finally:
            first.kill()


def test_the_health_check_asks_the_cluster_or_looks_at_the_program():
    assert health() == 0
    assert health(RAY_ADDRESS=f"127.0.0.1:{free_port()}") != 0
    with subprocess.Popen(["sleep", "60"]) as program:
        assert health(program.pid) == 0
        program.send_signal(signal.SIGSTOP)
        wait_until(lambda: health(program.pid) != 0, "a stopped program passes for a healthy one")
        program.kill()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copy the tracked files into a separate directory."""
    directory = tmp_path_factory.mktemp("checkout")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return directory


@pytest.mark.slow
def test_an_installed_package_finds_the_templates(checkout, tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, checkout],
        check=True, timeout=HANG_S,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=HANG_S)
    here = venv / "bin/python"
    # Only grpo-dist itself does not come from this environment.
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(
        "\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n"
    )
    install = [*pip[:3], "--python", here, *pip[3:], "install", "--no-deps", "--ignore-installed", wheel]
    subprocess.run(install, check=True, timeout=HANG_S)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "my.yaml").write_text((ROOT / "configs/demo.yaml").read_text())
    for target in (("slurm", "--gpus-per-node", "0"), ("ray",)):
        done = subprocess.run(
            [venv / "bin/grpo-dist", "submit", "my.yaml", "--to", *target, "--dry-run", "output_dir=/runs"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    where = """from grpo_dist.tools.submit import job as t
print(t.__file__, t._CHECKOUT.exists(), len(t.template('rayjob.yaml')))"""
    done = subprocess.run(
        [here, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    file, in_checkout, length = done.stdout.split()
    assert Path(file).is_relative_to(venv) and in_checkout == "False" and int(length) > 1000


@pytest.mark.evidence
@pytest.mark.timeout(7200)
def test_the_steps_of_the_image_make_a_working_environment(checkout, tmp_path):
    (step,) = [rest for word, rest in instructions(DOCKERFILES[1]) if word == "RUN" and "setup.sh" in rest]
    command = re.sub(r"--mount=\S+", "", step).replace("PYTHON=python3", f"PYTHON={sys.executable}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "TORCH_INDEX": "https://download.pytorch.org/whl/cpu",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    subprocess.run(["bash", "-c", command], cwd=checkout, env=environment, check=True, timeout=6600)
    short = ["model.path=demo:tiny", "steps=1", "batch.prompts_per_step=2", "batch.samples_per_prompt=2"]
    short += ["evaluation.before=false", "evaluation.after=false", f"output_dir={tmp_path}"]
    for arguments in (["--version"], ["check", "configs/demo.yaml"], ["train", "configs/demo.yaml", *short]):
        program = [checkout / ".venv/bin/grpo-dist", *arguments]
        subprocess.run(program, cwd=checkout, env=environment, check=True, timeout=HANG_S)
