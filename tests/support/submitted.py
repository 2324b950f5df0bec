"""Helpers of the submission tests: a small configuration, the command line, and a private Ray head."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from grpo_dist.cli import main
from tests.support.patience import HANG_S
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TINY = """
name: tiny
output_dir: OUT
steps: 2
model: {path: "demo:tiny"}
data: {train: [{path: "demo:add3"}], max_prompt_tokens: 32}
batch: {prompts_per_step: 2, samples_per_prompt: 2, micro_batch_tokens: 256}
sampling: {max_new_tokens: 8}
rollout: {kv_cache_gib: 0.25, enforce_eager: true}
evaluation: {before: false, after: false}
checkpoint: {export: false, every: 1}
tracking: {tensorboard: false}
"""


def config_in(directory, text=TINY, output=None):
    path = Path(directory) / "tiny.yaml"
    path.write_text(text.replace("OUT", str(output or Path(directory) / "runs")))
    return path


def command(capsys, *arguments):
    """Return the exit code, and the output of both streams."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def until(true, what):
    deadline = time.monotonic() + HANG_S
    while not (found := true()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.2)
    return found


@contextlib.contextmanager
def ray_head(directory):
    """Start a head with its own job server and token; yield the environment that reaches it."""
    port, client_port = free_port(), free_port()
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    place = Path(f"/tmp/ray-test-{os.getpid()}-{secrets.token_hex(3)}")  # short, because it holds sockets
    options = ["--head", "--block", "--port=0", f"--dashboard-port={port}", "--include-dashboard=true",
               f"--ray-client-server-port={client_port}", "--num-cpus=2", "--num-gpus=0",
               "--disable-usage-stats", "--dashboard-agent-listen-port=0", f"--temp-dir={place}"]  # fmt: skip

    heads = []

    def started():
        """Start the head, again if it misses Ray's own limit of 30 s; return whether it is up."""
        if not heads or heads[-1].poll() is not None:
            said = (directory / "head.out").read_text() if heads else ""
            assert not heads or "timed out during startup" in said, said
            with (directory / "head.out").open("w") as out:
                heads.append(
                    subprocess.Popen(
                        [BIN / "ray", "start", *options],
                        stdout=out, stderr=out, env=environment, start_new_session=True,
                    )
                )  # fmt: skip
        return (place / "ray_current_cluster").is_file()

    try:
        until(started, lambda: (directory / "head.out").read_text())
        yield {
            "GCS_ADDRESS": (place / "ray_current_cluster").read_text(),
            "RAY_ADDRESS": f"http://127.0.0.1:{port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": environment["RAY_AUTH_TOKEN"],
        }
    finally:
        head = heads[-1]
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(place, ignore_errors=True)


def health(process=None, **environment):
    """Return the exit code of the image's health check for ``process`` or the cluster of ``environment``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", ROOT / "docker/healthcheck.sh", str(process or os.getpid())], env=own | environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=HANG_S,
    ).returncode  # fmt: skip
