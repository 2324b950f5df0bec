"""The surroundings of a submitted job: fake cluster programs that record their calls, and a RayJob schema."""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from grpo_dist.cli import main
from tests.support.patience import HANG_S, wait_until
from tests.support.processes import free_port

# Helpers of the submission tests: a small configuration, the command line, and a private Ray head.

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
    """Run `grpo-dist`; return the exit code, and the output of both streams."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@contextlib.contextmanager
def ray_head(directory):
    """Start a head with a job server and token; yield the environment variables that reach it."""
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
        """Start the head, again if it misses Ray's limit of 30 s; return whether it is up."""
        if not heads or heads[-1].poll() is not None:
            output = (directory / "head.out").read_text() if heads else ""
            assert not heads or "timed out during startup" in output, output
            with (directory / "head.out").open("w") as out:
                heads.append(
                    subprocess.Popen(
                        [BIN / "ray", "start", *options],
                        stdout=out, stderr=out, env=environment, start_new_session=True,
                    )
                )  # fmt: skip
        return (place / "ray_current_cluster").is_file()

    try:
        wait_until(started, lambda: (directory / "head.out").read_text())
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
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", ROOT / "docker/healthcheck.sh", str(process or os.getpid())], env=variables | environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=HANG_S,
    ).returncode  # fmt: skip


# Fake Slurm programs, and a job as Slurm runs it.

SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$SLURM_STAND_IN/calls"
exit 1
"""
SBATCH = """#!/usr/bin/env bash
echo "sbatch $*" >> "$SLURM_STAND_IN/calls"
cat > "$SLURM_STAND_IN/script"
echo 4711
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$SLURM_STAND_IN/calls"
[[ $1 != show ]] || cat "$SLURM_STAND_IN/job"
"""
SQUEUE = """#!/usr/bin/env bash
echo "squeue $*" >> "$SLURM_STAND_IN/calls"
[[ ! -e $SLURM_STAND_IN/squeue-fails ]] || { cat "$SLURM_STAND_IN/squeue-fails" >&2; exit 1; }
cat "$SLURM_STAND_IN/queue" 2>/dev/null || true
"""
SACCT = """#!/usr/bin/env bash
[[ ! -e $SLURM_STAND_IN/no-accounting ]] || exit 1
echo 'COMPLETED|0:0|00:10:00'
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >> "$SLURM_STAND_IN/calls"
"""
PROGRAMS = {
    "srun": SRUN, "sbatch": SBATCH, "scontrol": SCONTROL, "squeue": SQUEUE, "sacct": SACCT,
    "scancel": SCANCEL,
}  # fmt: skip

# Replaces the driver: prints its arguments; ends cleanly on a signal.
DRIVER = """#!{python}
import json, os, signal, sys, time
told = dict(arguments=sys.argv[1:], variable=os.environ.get("GIVEN"), auth=os.environ["RAY_AUTH_MODE"],
            token=len(os.environ["RAY_AUTH_TOKEN"]))
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
print("DRIVER", json.dumps(told), flush=True)
until = time.monotonic() + float(os.environ.get("DRIVER_S", "600"))
while not asked and time.monotonic() < until:
    time.sleep(0.1)
time.sleep(1)
print("checkpoint saved" if len(asked) == 1 else f"asked {{len(asked)}} times", flush=True)
sys.exit(75 if asked else int(os.environ.get("DRIVER_CODE", "0")))
"""


# Replaces Ray in tests of only the script.
RAY = """#!/usr/bin/env bash
echo "ray $*" >> "$SLURM_STAND_IN/calls"
if [[ -e $SLURM_STAND_IN/ray-fails ]]; then
    rm "$SLURM_STAND_IN/ray-fails"
    echo "port in use"
    exit 1
fi
for option in "$@"; do
    [[ $option != --temp-dir=* ]] || echo stand-in > "${option#--temp-dir=}/ray_current_cluster"
done
exec sleep 1000
"""
PYTHON = """#!/usr/bin/env bash
[[ $* != *grpo_dist.tools.submit.nodes* ]] || exit 0
exec REAL "$@"
"""


class Running:
    """Runs a script as Slurm does on the first node, with DRIVER instead of grpo-dist."""

    def __init__(self, directory, script, *arguments, nodes=2, number=None, **environment):
        self.mark = uuid.uuid4().hex
        text = script.replace("nodes_deadline_s=600", "nodes_deadline_s=300")
        driver = directory / "driver" / "grpo-dist"
        driver.parent.mkdir(exist_ok=True)
        driver.write_text(DRIVER.format(python=sys.executable))
        driver.chmod(0o755)
        text = text.replace("train=(grpo-dist", f"train=({shlex.quote(str(driver))}")
        self.path = directory / "job.sh"
        self.path.write_text(text)
        self.job = number or f"{os.getpid()}{uuid.uuid4().hex[:4]}"
        self.out = directory / "job.out"
        variables = {
            "SLURM_JOB_ID": self.job, "SLURM_JOB_NUM_NODES": str(nodes), "SLURMD_NODENAME": "node1",
            "SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "1", "GRPO_DIST_TEST_RUN": self.mark,
        }  # fmt: skip
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                ["bash", self.path, *arguments], stdout=out, stderr=out, cwd=directory,
                env=os.environ | variables | environment, start_new_session=True,
            )  # fmt: skip

    def said(self):
        return self.out.read_text()

    def driver(self):
        wait_until(lambda: "DRIVER " in self.said() or self.process.poll() is not None, self.said)
        lines = [line for line in self.said().splitlines() if line.startswith("DRIVER ")]
        assert lines, self.said()
        return json.loads(lines[0].removeprefix("DRIVER "))

    def end(self, seconds=HANG_S):
        code = self.process.wait(seconds)
        wait_until(lambda: not self.survivors(), lambda: f"{self.survivors()}")
        assert not list(Path("/tmp").glob(f"ray-{self.job}-*"))
        return code

    def survivors(self):
        processes = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("GRPO_DIST_TEST_RUN") == self.mark:
                    processes.append((process.pid, process.cmdline()[:3]))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return processes

    def kill(self):
        for pid, _ in self.survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for left in Path("/tmp").glob(f"ray-{self.job}-*"):
            shutil.rmtree(left, ignore_errors=True)


# Schema of the RayJobs that this project writes: types, required keys, and no other keys, from the API's
# documentation. With KUBERAY_CRD a test compares it with the definition that KubeRay publishes: done for
# 1.5.1, 1.6.0 and 1.7.0. 1.5.0 has no `authOptions`.

TEXT, WHOLE, NUMBER, TRUTH = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGT]i?)?$"}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}


def an(properties, *required):
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False,
    }  # fmt: skip


def some(items):
    return {"type": "array", "items": items}


_TEXTS = {"type": "object", "additionalProperties": TEXT}
_VARIABLE = an(
    {"name": TEXT, "value": TEXT, "valueFrom": an({"secretKeyRef": an({"name": TEXT, "key": TEXT}, "key")})},
    "name",
)
_CONTAINER = an(
    {
        "name": TEXT,
        "image": TEXT,
        "env": some(_VARIABLE),
        "envFrom": some(an({"secretRef": an({"name": TEXT})})),
        "ports": some(an({"name": TEXT, "containerPort": WHOLE}, "containerPort")),
        "resources": an({"limits": {"type": "object", "additionalProperties": QUANTITY}}),
        "volumeMounts": some(an({"name": TEXT, "mountPath": TEXT, "readOnly": TRUTH}, "name", "mountPath")),
    },
    "name",
)
_VOLUME = an(
    {
        "name": TEXT,
        "configMap": an({"name": TEXT}),
        "persistentVolumeClaim": an({"claimName": TEXT}, "claimName"),
        "emptyDir": an({"medium": TEXT, "sizeLimit": {}}),
    },
    "name",
)
_POD = an(
    {
        "securityContext": an({"fsGroup": WHOLE}),
        "terminationGracePeriodSeconds": WHOLE,
        "containers": some(_CONTAINER),
        "tolerations": some(an({"key": TEXT, "operator": TEXT, "effect": TEXT})),
        "volumes": some(_VOLUME),
    },
    "containers",
)
_TEMPLATE = an({"spec": _POD})
_GROUP = an(
    {
        "groupName": TEXT, "replicas": WHOLE, "minReplicas": WHOLE, "maxReplicas": WHOLE,
        "rayStartParams": _TEXTS, "template": _TEMPLATE,
    },
    "groupName",
    "minReplicas",
    "maxReplicas",
    "template",
)  # fmt: skip
_CLUSTER = an(
    {
        "rayVersion": TEXT,
        "authOptions": an({"mode": {"type": "string", "enum": ["disabled", "token"]}}),
        "headGroupSpec": an({"rayStartParams": _TEXTS, "template": _TEMPLATE}, "template"),
        "workerGroupSpecs": some(_GROUP),
    },
    "headGroupSpec",
)
RAYJOB = an(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": an({"name": NAME, "namespace": TEXT, "labels": _TEXTS}, "name"),
        "spec": an(
            {
                "entrypoint": TEXT, "entrypointNumCpus": NUMBER, "entrypointResources": TEXT,
                "runtimeEnvYAML": TEXT, "backoffLimit": WHOLE,
                "shutdownAfterJobFinishes": TRUTH, "ttlSecondsAfterFinished": WHOLE,
                "rayClusterSpec": _CLUSTER,
            },
            "entrypoint",
            "rayClusterSpec",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)  # fmt: skip
