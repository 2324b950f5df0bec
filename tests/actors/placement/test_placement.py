"""Assignment of devices to workers, computed without a cluster."""

import asyncio

import pytest

from actors import cluster
from actors.placement.demands import (
    Demand,
    Devices,
    Resources,
    colocated_ranks,
    describe,
    is_colocated,
    placement,
    share_out,
)
from actors.placement.fitting import Node
from grpo_dist.errors import UserError
from tests.support.made_placements import config, shape

NODE = Resources(cpus=64, gpus=8)
LAPTOP = Resources(cpus=4, gpus=0)


@pytest.mark.parametrize(
    ("ranks", "engines", "tensor_parallel", "colocated"),
    [(4, 4, 1, False), (4, 2, 2, False), (4, 1, 4, False), (8, 8, 1, True), (8, 4, 2, True), (8, 1, 8, True)],
)
def test_auto_separates_where_the_gpus_suffice(ranks, engines, tensor_parallel, colocated):
    wanted = shape(ranks, engines, tensor_parallel)
    demands = placement(wanted, NODE, training=True)
    assert is_colocated(wanted, NODE) is colocated
    assert demands["policy"].gpus == 1 and not demands["policy"].shared
    threads, cpus = demands["rollout"].threads, 0 if colocated else 1
    assert demands["rollout"] == Demand(engines, tensor_parallel, threads, colocated, cpus)


def test_one_gpu_is_enough_for_a_run():
    demands = placement(config(), Resources(8, 1), training=True)
    assert demands["rollout"].shared
    assert (
        describe(demands, Resources(8, 1))
        == "1 GPU(s), 8 CPU(s): rollout 1 x 1 GPU(s) of the policy's, rewards 1 x 1 CPU thread(s), "
        "policy 1 x 1 GPU(s)"
    )


def test_colocated_can_be_asked_for_where_the_gpus_would_suffice():
    assert placement(shape(4, 4, where="colocated"), NODE, training=True)["rollout"].shared
    assert not placement(shape(4, 4, where="colocated"), NODE, training=False)["rollout"].shared


def test_a_reference_takes_gpus_of_its_own_in_either_placement():
    kl = {"algorithm": {"kl": {"coef": 0.1}}}
    assert placement(shape(4, 4, where="colocated", **kl), NODE, training=True)["reference"].gpus == 1
    with pytest.raises(UserError, match=r"9 GPUs are needed \(policy 8 x 1 \+ reference 1 x 1\)"):
        placement(shape(8, 8, where="colocated", **kl), NODE, training=True)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            shape(8, 8, where="colocated", max_staleness=1),
            ["`max_staleness` = 1", "cluster.placement=separate"],
        ),
        (shape(8, 4, where="colocated"), ["= 4 * 1 must be `policy.num_workers` = 8"]),
        (shape(8, 8, where="separate"), ["16 GPUs are needed", "set cluster.placement=colocated"]),
        (shape(8, 4), ["12 GPUs are needed", "policy 8 x 1"]),
        (shape(8, 8, max_staleness=1), ["16 GPUs are needed"]),
        (
            config(policy={"zero_stage": 0}, cluster={"placement": "colocated"}),
            ["`policy.zero_stage` = 0", "policy.zero_stage=1"],
        ),
        (
            config(policy={"zero_stage": 3}, cluster={"placement": "colocated"}),
            ["`policy.zero_stage` = 3", "policy.zero_stage=2", "policy.offload.optimizer=cpu"],
        ),
        (
            config(
                policy={"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
                cluster={"placement": "colocated"},
            ),
            ["policy.offload.parameters", "cluster.placement=separate"],
        ),
    ],
)
def test_more_gpus_than_there_are_is_refused(wanted, words):
    with pytest.raises(UserError) as refusal:
        placement(wanted, NODE, training=True)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_partitioned_model_is_colocated_with_its_optimiser_in_host_memory():
    zero = {"offload_optimizer": {"device": "cpu"}}
    policy = {"zero_stage": 3, "deepspeed": {"zero_optimization": zero}}
    assert placement(config(policy=policy), Resources(8, 1), training=True)["rollout"].shared


def test_colocation_is_proposed_only_where_it_would_work():
    with pytest.raises(UserError) as refusal:
        placement(shape(8, 4), NODE, training=True)
    assert "colocated" not in str(refusal.value)


def test_nccl_is_refused_between_two_processes_on_one_gpu():
    with pytest.raises(
        ValueError, match=r"`weight_sync\.backend` = nccl cannot connect two processes on one GPU"
    ):
        config(cluster={"placement": "colocated"}, weight_sync={"backend": "nccl"})


@pytest.mark.parametrize(
    ("where", "staleness", "threads"),
    [("auto", 0, 4), ("auto", 1, 2), ("colocated", 1, 4), ("separate", 0, 2), ("colocated", 0, 4)],
)
def test_without_gpus_the_placement_decides_shares_of_threads(where, staleness, threads):
    demands = placement(shape(1, 1, where=where, max_staleness=staleness), LAPTOP, training=True)
    assert demands["rollout"] == demands["policy"] == Demand(1, 0, threads)
    alone = placement(shape(1, 1, where=where, max_staleness=staleness), LAPTOP, training=False)
    assert alone["rollout"].threads == 4


def test_engines_get_neighbouring_gpus_of_one_node():
    held = [Devices("a", ("0",)), Devices("b", ("4",)), Devices("a", ("1",)), Devices("b", ("5",))]
    assert share_out(held, 2) == [Devices("a", ("0", "1")), Devices("b", ("4", "5"))]
    assert share_out(held, 1) == [
        Devices(n, (g,)) for n, g in (("a", "0"), ("a", "1"), ("b", "4"), ("b", "5"))
    ]


def test_each_engine_process_is_paired_with_the_rank_on_its_gpu():
    held = [Devices("b", ("4",)), Devices("a", ("0",)), Devices("b", ("5",)), Devices("a", ("1",))]
    engines = share_out(held, 2)
    assert engines == [Devices("b", ("4", "5")), Devices("a", ("0", "1"))]
    assert colocated_ranks(held, engines) == [0, 2, 1, 3]
    assert colocated_ranks(held, share_out(held, 1)) == [0, 2, 1, 3]


def test_an_engine_that_would_span_nodes_is_refused():
    held = [Devices("a", ("0",)), Devices("a", ("1",)), Devices("a", ("2",)), Devices("b", ("0",))]
    with pytest.raises(UserError, match=r"node a has 3 policy rank\(s\), and an engine cannot span nodes"):
        share_out(held, 2)


@pytest.mark.parametrize(
    ("connects", "address", "shared"),
    [(True, None, False), (True, "10.0.0.1:6379", True), (False, None, True), (False, "10.0.0.1:6379", True)],
)
def test_compute_workers_reserve_cpus_in_every_shared_cluster(monkeypatch, connects, address, shared):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "connect", lambda config: connects)
    monkeypatch.setattr(cluster, "expected", lambda config: [Node("a", 4, 0, 4, 0)])
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)

    async def demanded():
        async with cluster.Cluster(config(cluster={"placement": "separate", "address": address})) as own:
            return await own._placed(training=True)

    reserved = {role: demand.cpus for role, demand in asyncio.run(demanded()).items()}
    assert (reserved["rollout"] > 0, reserved["policy"] > 0, reserved["rewards"]) == (shared, shared, 0)


class Held:
    """A reservation that is held."""

    is_held, given_back = True, False

    async def wait_ready(self, config):
        self.waited_for = config

    def release(self):
        self.given_back = True


def test_restarted_workers_keep_their_reservation(monkeypatch):
    own = cluster.Cluster(config())
    reservation = own._factory.reservation = Held()

    async def start_training(model_dir):
        await own._reserve(training=True)
        return reservation.given_back

    monkeypatch.setattr(own, "start_training", start_training)
    assert asyncio.run(own.start_again("model")) is False
    assert reservation.waited_for is own._config
    asyncio.run(own.stop_workers())
    assert reservation.given_back
