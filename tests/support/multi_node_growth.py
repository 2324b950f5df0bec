"""A cluster whose head has no GPU and whose autoscaler adds GPU nodes; run by `test_reservation`.

Ray's fake node provider stands for the cloud: its nodes are processes of this machine.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import ray

from actors.cluster import Cluster
from actors.placement.reservation import nodes
from grpo_dist.config import Config
from grpo_dist.errors import UserError
from tests.chaos.find import MARK, Family
from tests.support.multi_node_reservations import Actor, config
from tests.support.patience import HANG_S
from tests.support.plans import reserved
from tests.support.processes import free_port

_NODE = {"CPU": 4, "GPU": 2}
_UP_S = 180.0
# Required keys of a cluster description for machines that commands set up.
_COMMANDS = (
    "cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands",
    "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
)  # fmt: skip


def start_head(directory: Path, mark: str) -> str:
    """Start a cluster that grows by up to two nodes and yield its address."""
    port, for_clients = free_port("127.0.0.1"), free_port("127.0.0.1")
    head = {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0}
    settings = {
        "cluster_name": "grows",
        "max_workers": 2,
        "idle_timeout_minutes": 30,
        "upscaling_speed": 10.0,
        "provider": {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}", "launch_multiple": True},
        "available_node_types": {
            "ray.head.default": head,
            "gpu": {"resources": _NODE, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": "ray.head.default",
    }
    settings |= {name: {} for name in ("auth", "docker", "file_mounts")} | {name: [] for name in _COMMANDS}
    (directory / "grows.json").write_text(json.dumps(settings))
    own_id = "f" * 51 + "00000"  # the provider takes this id for the head's
    environment = os.environ | {
        MARK: mark,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": own_id,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": own_id,
    }
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--node-ip-address=127.0.0.1",
        f"--port={port}", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false",
        f"--ray-client-server-port={for_clients}", f"--temp-dir={directory}/ray", "--disable-usage-stats",
        f"--autoscaling-config={directory}/grows.json",
    ]  # fmt: skip
    subprocess.run(command, env=environment, check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    return f"127.0.0.1:{port}"


def growing(**timeouts):
    wanted = config(**timeouts)
    to = {"nodes": 2, "cpus": _NODE["CPU"], "gpus": _NODE["GPU"]}
    plain = wanted.model_dump(mode="json")
    return Config.model_validate(plain | {"cluster": plain["cluster"] | {"grows_to": to}})


async def session():
    assert [node.gpus for node in nodes()] == [0]
    try:
        await Cluster(config(placement_timeout_s=60))._placed(training=True)
    except UserError as error:
        print(error, flush=True)
    wanted = growing(placement_timeout_s=_UP_S)
    demands = await Cluster(wanted)._placed(training=True)
    assert demands["policy"].gpus == 1 and demands["rollout"].gpus == 2
    reservation = await reserved(wanted, demands)
    engine = Actor.options(**reservation.options("rollout")[0]).remote()
    assert ray.get(engine.gpus.remote(), timeout=HANG_S) == 2
    print(f"grown to {sum(node.gpus == 2 for node in nodes())} nodes", flush=True)
    reservation.release()


def main():
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="grows-", dir="/tmp") as directory:
        try:
            ray.init(address=start_head(Path(directory), mark), log_to_driver=False)
            asyncio.run(session())
        finally:
            ray.shutdown()
            Family(mark).kill()


if __name__ == "__main__":
    main()
