"""A training run whose cluster gains and loses nodes; `test_engines_come_and_go` runs it as a process.

nodes   1 -> 2 -> 1 (drained) -> 3 -> 2 (lost)
engines 1 -> 2 -> 1           -> 3 -> 2
"""

import subprocess
import sys
from pathlib import Path

import ray

from tests.support.multi_node_run import LIMIT_S, lines, started, steps_done, wait
from tests.support.several_nodes import PatientCluster

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
SETTINGS = (
    f"steps={STEPS}", "rollout.threads=1", "policy.num_workers=1",
    "policy.threads=1",
    "algorithm.kl.coef=0", "cluster.restarts.hang_s=60",
    f"code_paths=[{ROOT / 'tests/support'}]",
)  # fmt: skip
NOTICE_S = 120


def command(directory, *overrides):
    train = [sys.executable, "-m", "grpo_dist.cli", "train", str(ROOT / "tests/chaos/job.yaml")]
    return [*train, f"output_dir={directory}", *SETTINGS, *overrides]


def serving(run_dir):
    records = lines(run_dir)
    return records[-1]["engines/serving"] if records else 0


def drain(cluster, node):
    ray_command = str(Path(sys.executable).with_name("ray"))
    arguments = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    notice = ["--deadline-remaining-seconds", str(NOTICE_S)]
    place = ["--address", cluster.address, "--node-id", node.node_id]
    subprocess.run([ray_command, "drain-node", *place, *arguments, *notice], check=True, timeout=LIMIT_S)


def main(directory, placement):
    cluster = PatientCluster(initialize_head=True, head_node_args={"num_cpus": 0})
    # The policy's rank and the reserved engine; on one core if colocated.
    cluster.add_node(num_cpus=1 if placement == "colocated" else 2)
    ray.init(address=cluster.address, log_to_driver=False)
    run_dir = Path(directory) / "run"
    train = command(
        directory,
        f"cluster.placement={placement}",
        f"cluster.address={cluster.address}",
        "rollout.num_workers={min: 1, max: 3}",
    )
    with started(train, directory, cluster) as run:

        def until(count, what):
            wait(lambda: serving(run_dir) == count, run, what)
            print(f"{what}: {count} engine(s) after step {steps_done(run_dir)}", flush=True)

        until(1, "the run begins")
        first = cluster.add_node(num_cpus=1)
        until(2, "a node is added")
        drain(cluster, first)
        until(1, "the node is drained")
        cluster.remove_node(first, allow_graceful=False)
        others = [cluster.add_node(num_cpus=1) for _ in range(2)]
        until(3, "two nodes are added")
        cluster.remove_node(others[0], allow_graceful=False)
        until(2, "a node is lost")
        drain(cluster, others[1])
        until(1, "the last node with a guest is drained")
        assert run.wait(LIMIT_S) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
