"""A cluster of two nodes that another job shares; `test_reservation` runs it as a process."""

import asyncio

import ray
from ray.util.placement_group import placement_group_table

from actors.placement.demands import Resources, placement
from actors.placement.fitting import Bundle, too_large
from actors.placement.reservation import nodes
from grpo_dist.config import Config
from grpo_dist.errors import UserError
from tests.support.patience import HANG_S
from tests.support.patient_cluster import PatientCluster
from tests.support.plans import reserved


def config(**timeouts):
    base = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}
    shape = {"policy": {"num_workers": 2}, "rollout": {"num_workers": 1, "tensor_parallel_size": 2}}
    where = {"placement": "separate", "timeouts": timeouts}
    return Config.model_validate(base | shape | {"cluster": where})


@ray.remote(num_cpus=0)
class Actor:
    def where(self):
        return ray.get_runtime_context().get_node_id()

    def gpus(self):
        return len(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def demands(wanted):
    return placement(wanted, Resources(8, 4, 4, shared=True), training=True)


def groups():
    return [g["state"] for g in placement_group_table().values()]


async def session(cluster):
    wanted = config(placement_timeout_s=1)
    tenant = Actor.options(num_gpus=1).remote()
    there = ray.get(tenant.where.remote())
    try:
        await reserved(wanted, demands(wanted))
    except UserError as error:
        print(error, flush=True)
    assert groups() == ["REMOVED"], groups()

    # Another job gives its GPU back while the run waits.
    waits = config(placement_timeout_s=60)
    taking = asyncio.create_task(reserved(waits, demands(waits)))
    await asyncio.sleep(3.0)
    assert not taking.done() and ray.get(tenant.where.remote()) == there
    ray.kill(tenant)
    reservation = await taking
    ranks = [Actor.options(**place).remote() for place in reservation.options("policy")]
    (engine,) = (Actor.options(**place).remote() for place in reservation.options("rollout"))
    homes = ray.get([rank.where.remote() for rank in ranks])
    assert homes[0] == homes[1] != ray.get(engine.where.remote())
    assert ray.get([rank.gpus.remote() for rank in ranks] + [engine.gpus.remote()]) == [1, 1, 2]
    print("placed", flush=True)

    # The node of the ranks is lost; the one in its place takes their bundles, and the engine stays.
    at = ray.get(engine.where.remote())
    (lost,) = (node for node in cluster.worker_nodes if node.node_id == homes[0])
    cluster.remove_node(lost)
    cluster.add_node(num_cpus=4, num_gpus=2)
    anew = [Actor.options(**place).remote() for place in reservation.options("policy")]
    async with asyncio.timeout(HANG_S):
        news = [await rank.where.remote() for rank in anew]
    assert news[0] == news[1] != homes[0] and ray.get(engine.where.remote()) == at
    print("replaced", flush=True)

    reservation.release()
    reservation.release()
    async with asyncio.timeout(HANG_S):
        while sum(node.free_gpus for node in nodes()) < 4:
            await asyncio.sleep(0.1)
    print("given back", flush=True)
    print(too_large([Bundle("rollout", 4, 0)], nodes()).splitlines()[0], flush=True)


if __name__ == "__main__":
    cluster = PatientCluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=4, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        asyncio.run(session(cluster))
    finally:
        ray.shutdown()
        cluster.shutdown()
