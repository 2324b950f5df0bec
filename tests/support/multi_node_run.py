"""A training run on several nodes that another job shares; `test_lost_nodes` runs it as a process.

First the node of an engine is lost, then the policy's node.
"""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from ray._private.state import actors

from tests.support.several_nodes import PatientCluster

ROOT = Path(__file__).resolve().parents[2]
STEPS, LIMIT_S = 24, 3600


@ray.remote(num_cpus=0, resources={"other": 1})
class Tenant:
    """An actor of another job."""

    def count(self):
        self.counted = getattr(self, "counted", 0) + 1
        return self.counted


def homes():
    """Return the node of each worker of the run, by class."""
    return {
        actor["ActorClassName"]: actor["Address"]["NodeID"]
        for actor in actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] in ("RolloutWorker", "PolicyWorker")
    }


def lines(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done(run_dir):
    return max((line["step"] for line in lines(run_dir)), default=0)


def wait(condition, run, what):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert run.poll() is None, f"the run ended with {run.returncode} while {what}"
        assert time.monotonic() < end, what
        time.sleep(0.2)


def lose(cluster, run_dir, run, role):
    """Kill the node of ``role`` with all its processes and add a new node."""
    wait(lambda: len(homes()) == 2, run, "its workers start")
    before, step = homes(), steps_done(run_dir)
    assert before["RolloutWorker"] != before["PolicyWorker"]
    (node,) = (n for n in cluster.worker_nodes if n.node_id == before[role])
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    wait(lambda: steps_done(run_dir) >= step + 3, run, f"going on without the node of {role}")
    print(f"lost the node of {role} after step {step}, and went on", flush=True)


@contextmanager
def started(command, directory, cluster):
    """Start ``command`` with its output in output.txt; at the end kill it and shut the cluster down."""
    with open(Path(directory) / "output.txt", "w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield run
        finally:
            if run.poll() is None:
                psutil.Process(run.pid).kill()
            ray.shutdown()
            cluster.shutdown()


def main(directory):
    cluster = PatientCluster(initialize_head=True, head_node_args={"num_cpus": 0, "resources": {"other": 1}})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, namespace="tenant", log_to_driver=False)
    tenant = Tenant.remote()
    assert ray.get(tenant.count.remote()) == 1
    overrides = [
        f"output_dir={directory}", f"code_paths=[{ROOT / 'tests/support'}]",
        f"cluster.address={cluster.address}",
        f"steps={STEPS}", "max_staleness=1", "cluster.placement=separate", "rollout.num_workers=1",
        "policy.num_workers=1", "algorithm.kl.coef=0", "cluster.restarts.hang_s=13",
    ]  # fmt: skip
    command = [sys.executable, "-m", "grpo_dist.cli", "train", str(ROOT / "tests/chaos/job.yaml"), *overrides]
    run_dir = Path(directory) / "run"
    with started(command, directory, cluster) as run:
        wait(lambda: steps_done(run_dir) >= 3, run, "its first steps")
        for role in ("RolloutWorker", "PolicyWorker"):
            lose(cluster, run_dir, run, role)
        assert run.wait(LIMIT_S) == 0
        assert ray.get(tenant.count.remote()) == 2  # the same actor, untouched
        alive = [a for a in actors().values() if a["State"] == "ALIVE"]
        assert [a["ActorClassName"] for a in alive] == ["Tenant"], alive
        print("another job's actor is untouched, and no actor of the run is left", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
