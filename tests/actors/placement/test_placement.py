"""Assignment of devices to workers, computed without a cluster."""

import asyncio
from contextlib import nullcontext

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
from actors.placement.fitting import Node, bundles
from grpo_dist.config.rewards import OutcomeModelConfig
from grpo_dist.errors import UserError
from tests.support.plans import config, shape

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


@pytest.mark.parametrize(
    ("backend", "engines", "where", "problem"),
    [
        ("nccl", 8, "auto", "nccl cannot connect two processes on one GPU"),  # no room for 16
        ("nccl", 4, "auto", None),
        ("ipc", 4, "auto", "ipc needs policy and engines on the same GPUs"),
        ("ipc", 8, "auto", None),
        ("ipc", 4, "separate", "ipc needs policy and engines on the same GPUs"),
    ],
)
def test_a_transport_that_the_placement_excludes_is_refused_with_it(backend, engines, where, problem):
    wanted = shape(engines, engines, where=where, weight_sync={"backend": backend})
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        placement(wanted, NODE, training=True)
    placement(wanted, NODE, training=False)  # nothing is sent


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cluster", [NODE, LAPTOP])
def test_environments_take_only_processors_and_only_where_a_source_has_one(training, cluster):
    source = {"path": "demo:add3"}
    data = {"train": [source], "eval": [source | {"environment": "calculator"}]}
    wanted = config(data=data, environments={"num_workers": 3})
    demands = placement(wanted, cluster, training=training)
    assert demands["environments"] == Demand(3, 0, 1, cpus=1 if cluster.gpus else 0)
    assert "environments 3 x 1 CPU thread(s)" in describe(demands, cluster)
    assert "environments" not in placement(config(), cluster, training=training)


KL = {"algorithm": {"kl": {"coef": 0.1}}}
MODELS = {"rewards": {"models": [{"name": "a", "path": "x", "num_workers": 2}, {"name": "b", "path": "y"}]}}


@pytest.mark.parametrize("where", ["auto", "colocated"])
def test_eight_gpus_hold_eight_ranks_engines_a_reference_and_reward_models(where):
    """The reference and each reward model have a copy on every GPU, whatever their `num_workers`."""
    demands = placement(shape(8, 8, where=where, **KL, **MODELS), NODE, training=True)
    assert {role: (d.workers, d.shared) for role, d in demands.items() if d.gpus} == {
        "rollout": (8, True), "reward_models": (16, True), "policy": (8, False), "reference": (8, True),
    }  # fmt: skip
    assert [(b.role, b.gpus, b.workers) for b in bundles(demands) if b.gpus] == [("policy", 1, 1)] * 8


def test_separate_roles_take_separate_gpus():
    demands = placement(shape(2, 2, where="separate", **KL, **MODELS), NODE, training=True)
    taken = {role: (d.workers, d.shared) for role, d in demands.items() if d.gpus}
    assert taken["reference"] == (1, False) and taken["reward_models"] == (3, False)
    with pytest.raises(
        UserError, match=r"9 GPUs are needed \(.*\+ reference 1 x 1\).*placement=colocated, or"
    ):
        placement(shape(4, 4, where="separate", **KL), NODE, training=True)
    with pytest.raises(UserError, match=r"reward_models 3 x 1.*`rewards\.models\[\*\]\.num_workers`"):
        placement(config(**MODELS, max_staleness=1), Resources(8, 4), training=True)
    on_cpus = r"rewards\.models\[\*\]\.num_workers` = 3 but the cluster has 2 CPUs"
    with pytest.raises(UserError, match=on_cpus):
        placement(config(**MODELS), Resources(2, 0), training=True)


def test_as_many_copies_as_fill_a_gpu_fit_it_as_ray_counts():
    """Ray rounds each share to 1e-4; a multiple of that is kept as it is."""
    for copies in (3, 6, 7, 9, 11, 13, 10_000):
        gpus = OutcomeModelConfig(name="m", path="x", gpu_share=1 / copies).gpus
        assert copies * round(gpus * 10_000) <= 10_000 and 0 <= 1 / copies - gpus < 1e-4
    for count in range(1, 10_001):
        assert OutcomeModelConfig(name="m", path="x", gpu_share=count / 10_000).gpus == count / 10_000
    with pytest.raises(ValueError, match="gpu_share"):
        OutcomeModelConfig(name="m", path="x", gpu_share=0.00005)


SHARES = [
    {"name": "small", "path": "x", "gpu_share": 0.25, "num_workers": 2},
    {"name": "large", "path": "y", "tensor_parallel_size": 2},
    {"name": "half", "path": "z", "gpu_share": 0.5},
    {"name": "whole", "path": "w"},
]


def test_reward_models_share_gpus_or_have_several():
    """Workers in the order of the models: 0.25, 0.25, 2, 0.5 and 1 GPUs on 2 + 1 + 1."""
    demands = placement(shape(2, 2, rewards={"models": SHARES}), NODE, training=True)
    demand = demands["reward_models"]
    assert demand.total_gpus == 4 and demand.each == (0.25, 0.25, 2, 0.5, 1)
    assert "reward_models 5 on 4 GPU(s)" in describe(demands, NODE)
    model_bundles = [b for b in bundles(demands) if b.role == "reward_models"]
    assert [(b.gpus, b.workers, b.shares) for b in model_bundles] == [
        (2, 1, ((2, 2),)), (1, 1, ((4, 1),)), (1, 3, ((0, 0.25), (1, 0.25), (3, 0.5))),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"8 GPUs are needed \(.*reward_models 5 on 4 \+.* but it has 7"):
        placement(shape(2, 2, where="separate", rewards={"models": SHARES}), Resources(64, 7), training=True)


@pytest.mark.parametrize(("refresh_every", "has"), [(0, False), (5, True)])
def test_adapters_on_shared_gpus_are_their_own_reference_unless_it_is_refreshed(refresh_every, has):
    adapters = {
        "policy": {"num_workers": 2, "lora": {"rank": 4}},
        "reference": {"refresh_every": refresh_every},
    }
    shared = config(**adapters, **KL, cluster={"placement": "colocated"})
    assert ("reference" in placement(shared, NODE, training=True)) is has
    apart = config(**adapters, **KL, cluster={"placement": "separate"})
    assert "reference" in placement(apart, NODE, training=True)


@pytest.mark.parametrize(
    ("ranks", "engines", "tensor_parallel", "sizes"),
    [(4, 2, 1, [1, 1, 1, 1]), (8, 2, 4, [4, 4]), (8, 1, 4, [4, 1, 1, 1, 1]), (8, 3, 2, [2, 2, 2, 1, 1])],
)
def test_engines_may_cover_some_of_the_policys_gpus(ranks, engines, tensor_parallel, sizes):
    """The ranks below one engine are on one node, all others anywhere."""
    demands = placement(shape(ranks, engines, tensor_parallel, where="colocated"), NODE, training=True)
    assert [b.workers for b in bundles(demands) if b.role == "policy"] == sizes


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            shape(8, 8, where="colocated", max_staleness=1),
            ["`max_staleness` = 1", "cluster.placement=separate"],
        ),
        (
            shape(2, 4, where="colocated"),
            ["= 4 * 1 must be at most `policy.num_workers` = 2", "cluster.placement=separate"],
        ),
        (
            shape(4, 1, 8, where="colocated"),
            ["`rollout.tensor_parallel_size` = 1 * 8 must be at most `policy.num_workers` = 4"],
        ),
        (shape(8, 8, where="separate"), ["16 GPUs are needed", "set cluster.placement=colocated, or"]),
        (shape(4, 8), ["12 GPUs are needed", "policy 4 x 1"]),
        (shape(8, 8, max_staleness=1), ["16 GPUs are needed"]),
    ],
)
def test_more_gpus_than_there_are_is_refused(wanted, words):
    with pytest.raises(UserError) as refusal:
        placement(wanted, NODE, training=True)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offloaded", ["none", "optimizer", "parameters"])
def test_every_kind_of_policy_state_can_be_colocated(stage, offloaded):
    offload = {} if offloaded == "none" else {offloaded: "cpu"}
    if (offloaded == "parameters" and stage != 3) or (offloaded == "optimizer" and stage == 0):
        return
    policy = {
        "zero_stage": stage,
        "offload": offload | ({"optimizer": "cpu"} if "parameters" in offload else {}),
    }
    assert placement(config(policy=policy), Resources(8, 1), training=True)["rollout"].shared


def test_colocation_is_proposed_only_where_it_would_work():
    with pytest.raises(UserError) as refusal:
        placement(shape(4, 8), NODE, training=True)
    assert "colocated" not in str(refusal.value)


_ONE_GPU = "cluster.placement=colocated policy.num_workers=1"
_LOWER = "lower `policy.num_workers`, or"
_AHEAD = shape(2, 1, max_staleness=1, **KL)
SPLIT = {
    "model": {"path": "demo:tiny", "packing": True},
    "policy": {"num_workers": 2, "sequence_parallel": 2},
}


@pytest.mark.parametrize(
    ("wanted", "gpus", "advice"),
    [
        # Separate, engine, ranks and reference take at least three GPUs.
        (_AHEAD, 1, f"has 1; set max_staleness=0 {_ONE_GPU}, or add nodes"),
        (_AHEAD, 2, "has 2; set max_staleness=0 cluster.placement=colocated, or add nodes"),
        (_AHEAD, 3, f"has 3; set max_staleness=0 cluster.placement=colocated, or {_LOWER} add nodes"),
        (shape(2, 1, **KL), 1, "has 1; set policy.num_workers=1, or add nodes"),  # they share it already
        (shape(4, 4, max_staleness=1), 3, "policy.num_workers=2 rollout.num_workers=2, or lower"),
        (shape(2, 1, where="separate", **KL), 1, f"has 1; set {_ONE_GPU}, or add nodes"),
        # Two ranks of one sequence cannot become one, completion order must run ahead, and engines take GPUs.
        (config(**SPLIT, max_staleness=1), 1, "has 1; add nodes"),
        (shape(1, 1, max_staleness=1, batch={"order": "completion"}), 1, "has 1; add nodes"),
    ],
)
def test_the_refusal_names_only_what_fits(wanted, gpus, advice):
    with pytest.raises(UserError) as refusal:
        placement(wanted, Resources(64, gpus), training=True)
    assert advice in str(refusal.value)


def test_nccl_is_refused_between_two_processes_on_one_gpu():
    with pytest.raises(
        ValueError, match=r"`weight_sync\.backend` = nccl, .*cannot connect two processes on one GPU"
    ):
        config(cluster={"placement": "colocated"}, weight_sync={"backend": "nccl"})


@pytest.mark.parametrize(
    ("where", "staleness", "threads"),
    [("auto", 0, 4), ("auto", 1, 2), ("separate", 0, 2), ("colocated", 0, 4)],
)
def test_without_gpus_the_placement_decides_shares_of_threads(where, staleness, threads):
    demands = placement(shape(1, 1, where=where, max_staleness=staleness), LAPTOP, training=True)
    assert demands["policy"] == Demand(1, 0, threads)
    assert demands["rollout"] == Demand(1, 0, threads, shared=where == "colocated")
    alone = placement(shape(1, 1, where=where, max_staleness=staleness), LAPTOP, training=False)
    assert alone["rollout"].threads == 4


def test_engines_get_neighbouring_gpus_of_one_node():
    ranks = [Devices("a", ("0",)), Devices("b", ("4",)), Devices("a", ("1",)), Devices("b", ("5",))]
    assert share_out(ranks, 2, 2) == [Devices("a", ("0", "1")), Devices("b", ("4", "5"))]
    assert share_out(ranks, 1, 2) == [Devices("a", ("0", "1"))]
    assert share_out(ranks, 4, 1) == [
        Devices(n, (g,)) for n, g in (("a", "0"), ("a", "1"), ("b", "4"), ("b", "5"))
    ]


def test_each_engine_process_is_paired_with_the_rank_on_its_gpu():
    ranks = [Devices("b", ("4",)), Devices("a", ("0",)), Devices("b", ("5",)), Devices("a", ("1",))]
    engines = share_out(ranks, 2, 2)
    assert engines == [Devices("b", ("4", "5")), Devices("a", ("0", "1"))]
    assert colocated_ranks(ranks, engines) == [0, 2, 1, 3]
    assert colocated_ranks(ranks, share_out(ranks, 4, 1)) == [0, 2, 1, 3]
    assert colocated_ranks(ranks, share_out(ranks, 1, 2)) == [0, 2]


def test_an_engine_that_would_span_nodes_is_refused():
    ranks = [Devices("a", ("0",)), Devices("a", ("1",)), Devices("a", ("2",)), Devices("b", ("0",))]
    assert share_out(ranks, 1, 2) == [Devices("a", ("0", "1"))]
    with pytest.raises(
        UserError, match=r"GPUs of one node each: .* \(3 on a, 1 on b\) have room for 1; lower"
    ):
        share_out(ranks, 2, 2)


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
        async with cluster.Cluster(config(cluster={"placement": "separate", "address": address})) as run:
            return await run._placed(training=True)

    reserved = {role: demand.cpus for role, demand in asyncio.run(demanded()).items()}
    assert (reserved["rollout"] > 0, reserved["policy"] > 0, reserved["rewards"]) == (shared, shared, 0)


class Held:
    """A reservation that is held."""

    is_held, given_back = True, False

    async def wait_ready(self, cluster):
        self.waited_for = cluster

    def release(self):
        self.given_back = True


def test_restarted_workers_keep_their_reservation(monkeypatch):
    run_cluster = cluster.Cluster(config())
    reservation = run_cluster._factory.reservation = Held()

    async def start_training(model_dir):
        await run_cluster._reserve(training=True)
        return reservation.given_back

    monkeypatch.setattr(run_cluster, "start_training", start_training)
    assert asyncio.run(run_cluster.start_again("model")) is False
    assert reservation.waited_for is run_cluster._config.cluster
    asyncio.run(run_cluster.stop_workers())
    assert reservation.given_back


EVALUATED = {
    "data": {"train": [{"path": "demo:add3"}], "eval": [{"path": "demo:add3", "split": "test"}]},
    "evaluation": {"num_workers": 1},
}


@pytest.mark.parametrize("where", ["separate", "colocated"])
def test_evaluation_engines_take_gpus_that_no_other_role_shares(where):
    wanted = config(
        **EVALUATED, policy={"num_workers": 2}, rollout={"num_workers": 2}, cluster={"placement": where}
    )
    demand = placement(wanted, NODE, training=True)["evaluation"]
    assert demand == Demand(1, 1, 1, shared=False, cpus=1)
    assert "evaluation" not in placement(wanted, NODE, training=False)
    with pytest.raises(UserError, match=r"5 GPUs are needed|3 GPUs are needed") as refused:
        placement(wanted, Resources(64, 2), training=True)
    assert "`evaluation.num_workers`" in str(refused.value)


def test_colocated_reward_models_cannot_score_while_the_policy_trains():
    wanted = config(**EVALUATED, **MODELS, cluster={"placement": "colocated"})
    with pytest.raises(UserError, match=r"`evaluation.num_workers` = 1: .* colocated with it"):
        placement(wanted, NODE, training=True)
