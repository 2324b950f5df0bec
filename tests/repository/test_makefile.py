"""The commands of the Makefile's targets; `test_halves.py` has the halves of `make test`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Logs its arguments and returns the code.
_STUB = """#!/bin/sh
echo "$*" >> "$LOG"
exit "$CODE"
"""


@pytest.fixture
def run_make(tmp_path):
    """Run a target with a fake Python that returns ``code``; return the exit code and the calls."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "python").write_text(_STUB)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "ready").touch()

    def run(target, code, *arguments):
        log = tmp_path / "calls"
        log.unlink(missing_ok=True)
        command = [
            "make", "-C", ROOT, target, f"BIN={tmp_path}", f"READY={tmp_path / 'ready'}",
            f"PACKAGES={tmp_path / 'ready'}", *arguments,
        ]  # fmt: skip
        # A `make test ARGS=...` that runs this test exports both.
        inherited = {n: value for n, value in os.environ.items() if n != "ARGS" and not n.startswith("MAKE")}
        environment = inherited | {"CODE": code, "LOG": str(log)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, log.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("target", "code", "option"), [("test", "0", ""), ("test", "1", ""), ("test-all", "0", "--all ")]
)
def test_the_suite_is_both_halves_and_fails_as_they_do(run_make, target, code, option):
    failed, (call,) = run_make(target, code, "ARGS=-k loss")
    assert (failed != 0) == (code != "0")
    assert call == f"-m tests.support.halves {option}-k loss"


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout with only these two files."""
    (tmp_path / "launch").mkdir()
    (tmp_path / ".venv").mkdir()
    (tmp_path / "pyproject.toml").touch()
    for name in ("Makefile", "launch/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("installed", "extra", "used"),
    [(None, None, "cpu"), (None, "gpu", "gpu"), ("gpu", None, "gpu"), ("gpu", "cpu", "cpu")],
)
def test_targets_use_the_environment_that_is_there(checkout, installed, extra, used):
    """For example without EXTRA, after `make demo EXTRA=gpu`. `make -n` only prints its commands."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    if installed:
        (checkout / f".venv/.ready-{installed}").touch()
    command = ["make", "-n", "-C", checkout, "bench", *([f"EXTRA={extra}"] if extra else [])]
    plain = {n: v for n, v in os.environ.items() if n != "EXTRA" and not n.startswith("MAKE")}
    would = subprocess.run(command, env=plain, capture_output=True, text=True, check=True).stdout
    assert f"configs/bench/{used}_" in would
    assert ("launch/setup.sh" in would) == (used != installed)
    assert "launch/setup.sh" not in would or f"EXTRA={used} " in would


def test_another_environment_is_refused_with_the_one_that_is_there(checkout):
    (checkout / ".venv/.ready-gpu").touch()
    environment = os.environ | {"EXTRA": "cpu", "PYTHON": sys.executable}
    command = ["bash", checkout / "launch/setup.sh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "EXTRA=gpu, not EXTRA=cpu; add EXTRA=gpu to the command" in done.stderr
    assert not (checkout / ".venv/bin").exists()


# The environment's Python: logs pip's calls, has pip's settings, and installs a uv that fails with $CODE.
_PYTHON = """#!/bin/sh
case "$*" in
    *"pip --disable-pip-version-check config list") printf '%s' "$SETTINGS" ;;
    *" install --quiet --no-compile --target "*)
        for last; do case "$last" in uv==*) ;; *) directory=$last ;; esac; done
        mkdir "$directory/bin" && cp "$UV" "$directory/bin/uv" ;;
    "-c "*) exec "$PYTHON" "$@" ;;
    *) echo "pip $*" >> "$LOG" ;;
esac
"""
_UV = """#!/bin/sh
echo "uv $* index=$UV_DEFAULT_INDEX more=$UV_INDEX wheels=$UV_FIND_LINKS certificate=$SSL_CERT_FILE" >> "$LOG"
exit "$CODE"
"""


@pytest.fixture
def set_up(checkout):
    """Run the set-up with these pip settings and this exit code of uv; return the calls."""
    (checkout / "docker").mkdir()
    (checkout / "docker/constraints-cpu.txt").write_text("numpy==2.3.5\n")
    (checkout / ".venv/bin").mkdir()
    for path, text in ((".venv/bin/python", _PYTHON), ("uv", _UV)):
        (checkout / path).write_text(text)
        (checkout / path).chmod(0o755)

    def run(code, settings):
        log = checkout / "log"
        environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "LOG": str(log), "CODE": code}
        environment |= {"SETTINGS": settings, "UV": str(checkout / "uv")}
        environment["TORCH_INDEX"] = "https://torch.test/cpu"
        command = ["bash", checkout / "launch/setup.sh"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return log.read_text().splitlines()

    return run


@pytest.mark.parametrize("code", ["0", "1"])
def test_set_up_installs_by_uv_with_the_settings_of_pip_or_by_pip(checkout, set_up, code):
    settings = """global.cert='/ca.crt'
global.constraint='/a.txt'
global.no-index='true'
global.extra-index-url='https://a.test/simple\\nhttps://b.test/simple'
global.index-url='https://global.test/simple'
install.index-url='https://install.test/simple'
freeze.index-url='https://freeze.test/simple'
:env:.constraint='/b.txt /c.txt'
:env:.find-links='/wheels /more'
"""
    calls = set_up(code, settings)
    first = calls[0]
    assert first.startswith("uv pip install ")
    assert "-c .venv/constraints.txt -e .[cpu,dev] -c /b.txt -c /c.txt --no-index " in first
    assert first.endswith(
        "index=https://install.test/simple more=https://a.test/simple https://b.test/simple "
        "wheels=/wheels,/more certificate=/ca.crt"
    )
    by_pip = [call for call in calls if call.startswith("pip ") and " install " in call]
    if code == "0":
        assert len(calls) == 2 and not by_pip
    else:
        assert "more=https://a.test/simple https://b.test/simple https://torch.test/cpu " in calls[1]
        assert [call.split("install --quiet ")[1] for call in by_pip] == [
            "torch==2.13.0+cpu", "-c .venv/constraints.txt -e .[cpu,dev]"
        ]  # fmt: skip
    assert "uninstall" in calls[-1]
    assert (checkout / ".venv/constraints.txt").read_text() == "torch==2.13.0+cpu\nnumpy==2.3.5\n"


def test_set_up_leaves_to_pip_what_uv_cannot_be_told(set_up):
    calls = set_up("0", "install.only-binary=':all:'\n")
    assert calls and not any(call.startswith("uv ") for call in calls)
