"""Fake Slurm programs that run everything on this machine, and a job as Slurm runs it."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from tests.support.patience import HANG_S
from tests.support.submitted import until

# Skips options up to the command, runs it here, and forwards SIGTERM to it.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$SLURM_STAND_IN/calls"
while [[ $1 == --* ]]; do shift; done
[[ ! -e $SLURM_STAND_IN/no-workers ]] || exit 1
"$@" > "$SLURM_STAND_IN/nodes.out" 2>&1 &
trap 'kill -TERM %1' TERM
wait %1
wait %1 2>/dev/null
exit 0
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
    "srun": SRUN,
    "sbatch": SBATCH,
    "scontrol": SCONTROL,
    "squeue": SQUEUE,
    "sacct": SACCT,
    "scancel": SCANCEL,
}

# Replaces the driver: prints its arguments and the nodes; ends cleanly on a signal.
DRIVER = """#!{python}
import json, os, signal, sys, time
told = dict(arguments=sys.argv[1:], variable=os.environ.get("GIVEN"), auth=os.environ["RAY_AUTH_MODE"],
            token=len(os.environ["RAY_AUTH_TOKEN"]))
if os.environ["RAY_ADDRESS"] != "stand-in":
    import ray
    ray.init(address="auto", log_to_driver=False)
    told["nodes"] = sum(node["Alive"] for node in ray.nodes())
    told["cpus"] = ray.cluster_resources()["CPU"]
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


# Replaces Ray in tests of the script alone.
RAY = """#!/usr/bin/env bash
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
    """Runs a script as Slurm does on the first node, with DRIVER or the real grpo-dist."""

    def __init__(self, directory, script, *arguments, nodes=2, stand_in=True, number=None, **environment):
        self.mark = uuid.uuid4().hex
        text = script.replace("nodes_deadline_s=600", "nodes_deadline_s=300")
        if stand_in:
            driver = directory / "driver" / "grpo-dist"
            driver.parent.mkdir(exist_ok=True)
            driver.write_text(DRIVER.format(python=sys.executable))
            driver.chmod(0o755)
            text = text.replace("train=(grpo-dist", f"train=({shlex.quote(str(driver))}")
        self.path = directory / "job.sh"
        self.path.write_text(text)
        self.job = number or f"{os.getpid()}{uuid.uuid4().hex[:4]}"
        self.out = directory / "job.out"
        own = {
            "SLURM_JOB_ID": self.job, "SLURM_JOB_NUM_NODES": str(nodes), "SLURMD_NODENAME": "node1",
            "SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "1", "GRPO_DIST_TEST_RUN": self.mark,
        }  # fmt: skip
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                ["bash", self.path, *arguments], stdout=out, stderr=out, cwd=directory,
                env=os.environ | own | environment, start_new_session=True,
            )  # fmt: skip

    def said(self):
        return self.out.read_text()

    def driver(self):
        until(lambda: "DRIVER " in self.said() or self.process.poll() is not None, self.said)
        lines = [line for line in self.said().splitlines() if line.startswith("DRIVER ")]
        assert lines, self.said()
        return json.loads(lines[0].removeprefix("DRIVER "))

    def end(self, seconds=HANG_S):
        code = self.process.wait(seconds)
        until(lambda: not self.survivors(), lambda: f"{self.survivors()}")
        assert not list(Path("/tmp").glob(f"ray-{self.job}-*"))
        return code

    def survivors(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("GRPO_DIST_TEST_RUN") == self.mark:
                    found.append((process.pid, process.cmdline()[:3]))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def kill(self):
        for pid, _ in self.survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for left in Path("/tmp").glob(f"ray-{self.job}-*"):
            shutil.rmtree(left, ignore_errors=True)
