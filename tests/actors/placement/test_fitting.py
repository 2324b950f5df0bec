"""What fits on the nodes of a cluster, and the message when it does not."""

import asyncio

import pytest
import ray

from actors import cluster, connection
from actors.placement.demands import Resources, placement
from actors.placement.fitting import Bundle, Node, bundles, fits, grown, no_room, too_large
from actors.placement.reservation import Reservation
from grpo_dist.config import AutoscalingConfig
from grpo_dist.errors import UserError
from tests.support.plans import config, shape

GPU = Bundle("policy", gpus=1, cpus=1)


def node(name, gpus, free_gpus, cpus=64.0, free_cpus=None):
    return Node(name, cpus, gpus, cpus if free_cpus is None else free_cpus, free_gpus)


def test_ranks_come_first_and_engines_are_whole():
    demands = placement(shape(2, 2, 4), Resources(64, 16, shared=True), training=True)
    assert bundles(demands) == [
        Bundle("policy", 1, 1), Bundle("policy", 1, 1), Bundle("rollout", 4, 1), Bundle("rollout", 4, 1),
        Bundle("rewards", 0, 1),
    ]  # fmt: skip


def test_ranks_that_share_gpus_with_one_engine_are_on_one_node():
    """Of nodes with 6 GPUs, 8 ranks would otherwise take 6 and 2, where no two engines of 4 fit."""
    demands = placement(shape(8, 2, 4, where="colocated"), Resources(64, 12, shared=True), training=True)
    wanted = [bundle for bundle in bundles(demands) if bundle.role == "policy"]
    assert wanted == [Bundle("policy", 4, 4, workers=4)] * 2
    assert fits(wanted, [node("a", 6, 6), node("b", 6, 6)])
    assert not fits(wanted, [node("a", 6, 6), node("b", 2, 2)])
    places = Reservation(wanted, "group").options("policy")
    assert [(p["num_gpus"], p["num_cpus"]) for p in places] == [(1, 1)] * 8
    assert too_large(wanted, [node("a", 2, 2)]).startswith(
        "4 workers of `policy`, on whose GPUs one engine samples, take 4 GPU(s) and 4 CPU(s) of one node"
    )
    indices = [p["scheduling_strategy"].placement_group_bundle_index for p in places]
    assert indices == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_private_cluster_without_gpus_reserves_nothing_and_a_shared_one_reserves_compute():
    wanted = shape(1, 1, where="separate")
    assert bundles(placement(wanted, Resources(4, 0), training=True)) == []
    two_nodes = Resources(5, 0, node_cpus=3, shared=True)  # one CPU is the driver's
    assert bundles(placement(wanted, two_nodes, training=True)) == [
        Bundle("policy", 0, 2), Bundle("rollout", 0, 2)
    ]  # fmt: skip
    assert bundles(placement(wanted, Resources(1, 0, shared=True), training=True)) == []  # one CPU for two


def test_no_worker_gets_more_threads_than_a_node_has():
    demands = placement(shape(1, 1, where="separate"), Resources(32, 0, node_cpus=4), training=True)
    assert demands["policy"].threads == demands["rollout"].threads == 4


@pytest.mark.parametrize(
    ("wanted", "free", "fit"),
    [
        ([4, 4], [8], True),
        ([4, 4], [4, 4], True),
        ([4, 4], [6, 2], False),  # eight are free, but no two times four on one node
        ([1, 1, 6], [6, 2], True),  # the large one first
        ([3, 3, 2, 2], [5, 5], True),
        ([1], [], False),
    ],
)
def test_each_worker_fits_on_one_node(wanted, free, fit):
    nodes = [node(str(i), 8, gpus) for i, gpus in enumerate(free)]
    assert fits([Bundle("rollout", gpus, 1) for gpus in wanted], nodes) is fit


def test_cpus_count_as_gpus_do():
    assert fits([GPU, GPU], [node("a", 8, 8, cpus=2)]) and not fits([GPU] * 3, [node("a", 8, 8, cpus=2)])


def test_a_worker_larger_than_every_node_is_reported_at_once():
    wide = [Bundle("rollout", 16, 1)]
    assert too_large(wide, [node("a", 8, 8), node("b", 16, 0)]) is None  # when b is free
    problem = too_large(wide, [node("10.0.0.1", 8, 8), node("10.0.0.2", 8, 3)])
    assert problem.splitlines() == [
        "a worker of `rollout` takes 16 GPU(s) and 1 CPU(s) of one node, and none has as much:",
        "  10.0.0.1: 8 of 8 GPU(s) and 64 of 64 CPU(s) free",
        "  10.0.0.2: 3 of 8 GPU(s) and 64 of 64 CPU(s) free",
    ]


def test_gpus_that_suffice_in_total_but_not_per_node_are_reported_at_once():
    """Four engines of 4 GPUs and two ranks are 18 GPUs, and three nodes of 6 take one engine each."""
    wanted = bundles(placement(shape(2, 4, 4, where="separate"), Resources(99, 18, 33), training=True))
    problem = too_large(wanted, [node(name, 6, 6) for name in "abc"])
    assert problem.startswith("its nodes have no room for 4 times 4 GPUs of one node each (`rollout`)")
    assert too_large(wanted, [node(name, 6, 0) for name in "abcd"]) is None  # once other jobs have ended


def test_capacity_that_came_too_late_is_reported():
    run_config = shape(1, 1, where="separate")
    wanted = bundles(placement(run_config, Resources(64, 8, shared=True), training=True))
    assert str(no_room(wanted, [node("a", 8, 8)], run_config.cluster)).endswith("start it again")


def test_nodes_that_an_autoscaler_adds_count_once():
    to = AutoscalingConfig(nodes=2, gpus=8, cpus=64)
    head, worker = node("head", 0, 0, cpus=4), node("a", 8, 2)
    assert grown([head], None) == [head]
    names = [n.name for n in grown([head, worker], to)]
    assert names == ["head", "a", "an added node"]
    assert grown([worker, worker, worker], to) == [worker] * 3
    run_config = _growing(shape(1, 1, where="separate"), to)
    wanted = bundles(placement(run_config, Resources(64, 8, shared=True), training=True))
    message = str(no_room(wanted, [head], run_config.cluster)).splitlines()
    assert message[-1].startswith("It has not grown to 2 node(s) with 8 GPU(s) and 64 CPU(s) each")
    smaller = node("b", 8, 0, cpus=63)  # only its GPUs count
    assert len(grown([worker, smaller], to)) == 2
    message = str(no_room(wanted, [head, node("a", 8, 1), smaller], run_config.cluster))
    assert "has not grown" not in message and message.endswith("Wait for other jobs, or add nodes")
    with pytest.raises(UserError, match=r"it has 16 with the nodes of `cluster\.grows_to`"):
        placement(_growing(shape(16, 16, where="separate"), to), Resources(128, 16), training=True)


def _growing(config, to):
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"grows_to": to})})


def test_a_private_cluster_does_not_grow(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    run_config = _growing(config(), AutoscalingConfig(nodes=2, gpus=8, cpus=64))
    for connect, settings in ((connection.fit, run_config), (connection.connect, run_config.cluster)):
        with pytest.raises(UserError, match=r"`cluster\.grows_to` is set, but the run starts a private"):
            connect(settings)


def test_a_run_that_lost_a_node_waits_for_another_and_a_new_run_does_not(monkeypatch):
    a, b = node("a", 8, 8), node("b", 8, 8)
    answers = iter([[a], [a], [a, b]])
    monkeypatch.setattr(cluster, "_POLL_S", 0.0)
    monkeypatch.setattr(cluster, "expected", lambda config: next(answers))
    run_cluster = cluster.Cluster(shape(8, 8, where="separate"))
    with pytest.raises(UserError, match="16 GPUs are needed"):
        asyncio.run(run_cluster._placed(training=True))
    run_cluster._generation = 1
    assert asyncio.run(run_cluster._placed(training=True))["policy"].workers == 8


def test_the_message_names_what_is_needed_what_is_free_and_what_to_do():
    run_config = shape(4, 2, 2, where="separate")
    nodes = [node("10.0.0.1", 8, 4, free_cpus=60), node("10.0.0.2", 8, 2)]
    demands = placement(run_config, Resources(128, 16, shared=True), training=True)
    message = str(no_room(bundles(demands), nodes, run_config.cluster)).splitlines()
    assert message == [
        "cluster: no room for this run within `cluster.timeouts.placement_timeout_s` = 300 s; it asks for",
        "  policy: 4 x 1 GPU(s) and 1 CPU(s)",
        "  rollout: 2 x 2 GPU(s) and 1 CPU(s)",
        "  rewards: 1 x 1 CPU(s)",
        "and has",
        "  10.0.0.1: 4 of 8 GPU(s) and 60 of 64 CPU(s) free",
        "  10.0.0.2: 2 of 8 GPU(s) and 64 of 64 CPU(s) free",
        message[-1],
    ]
    advice = "Lower `policy.num_workers` or `rollout.num_workers`, wait for other jobs, or add nodes"
    assert message[-1] == advice
    one, models = Bundle("policy", 1, 1), [Bundle("reward_models", 1, 1)] * 2
    message = str(no_room([one, *models, Bundle("evaluation", 1, 1)], [node("a", 2, 2)], run_config.cluster))
    assert "\nLower `evaluation.num_workers` or `rewards.models[*].num_workers`, wait for" in message
    assert "\nWait for other jobs, or" in str(no_room([one], [node("a", 8, 0)], run_config.cluster))
