"""A cluster of two nodes of 8 GPUs, over which Ray mixes equal bundles; `test_reservation` runs it."""

import asyncio
from functools import partial

import ray
from ray.util.placement_group import placement_group_table

from actors.placement.demands import Resources, placement
from actors.placement.fitting import nearest
from tests.support.multi_node_reservations import Actor
from tests.support.patience import HANG_S
from tests.support.patient_cluster import PatientCluster
from tests.support.plans import reserved, shape

NODE = {"num_cpus": 20, "num_gpus": 8}


def table(reservation):
    strategy = reservation.options("policy")[0]["scheduling_strategy"]
    return placement_group_table(strategy.placement_group)["bundles_to_node_id"]


def indices(reservation, role):
    return [place["scheduling_strategy"].placement_group_bundle_index for place in reservation.options(role)]


def nodes_of(reservation, role):
    homes = table(reservation)
    return {homes[index] for index in indices(reservation, role)}


async def session(cluster):
    wanted = shape(8, 8, where="separate")
    reservation = await reserved(wanted, placement(wanted, Resources(40, 16, 20), training=True))
    homes = table(reservation)
    letters = dict(zip(dict.fromkeys(homes.values()), "abc", strict=False))
    print("bundles on", "".join(letters[homes[i]] for i in range(len(homes))), flush=True)
    (ours,), (theirs,) = nodes_of(reservation, "policy"), nodes_of(reservation, "rollout")
    assert ours != theirs
    places = [reservation.options(role)[i] for role in ("policy", "rollout") for i in (0, 7)]
    actors = [Actor.options(**place).remote() for place in places]
    assert ray.get([actor.where.remote() for actor in actors], timeout=HANG_S) == [ours, ours, theirs, theirs]
    print("whole nodes", flush=True)

    (lost,) = (node for node in cluster.worker_nodes if node.node_id == ours)
    cluster.remove_node(lost)
    async with asyncio.timeout(HANG_S):
        while reservation.is_placed():
            await asyncio.sleep(0.1)
    cluster.add_node(**NODE)
    kept = indices(reservation, "rollout")
    would_fit = partial(nearest, wanted, training=True)
    await reservation.wait_ready(wanted.cluster, would_fit, only="policy")
    (news,) = nodes_of(reservation, "policy")
    assert news not in (ours, theirs) and indices(reservation, "rollout") == kept
    assert nodes_of(reservation, "rollout") == {theirs}
    await reservation.wait_ready(wanted.cluster, would_fit)
    assert nodes_of(reservation, "policy") != nodes_of(reservation, "rollout")
    assert len(nodes_of(reservation, "policy")) == len(nodes_of(reservation, "rollout")) == 1
    print("whole nodes again", flush=True)
    reservation.release()


if __name__ == "__main__":
    cluster = PatientCluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        asyncio.run(session(cluster))
    finally:
        ray.shutdown()
        cluster.shutdown()
