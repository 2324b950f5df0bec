"""Which bundle each worker gets, on nodes that Ray chose: by hand, and in a reservation without a cluster."""

import asyncio
from collections import Counter
from itertools import groupby

from actors import cluster
from actors.factory import TrainingActors
from actors.placement import reservation
from actors.placement.demands import Resources, placement
from actors.placement.fitting import Bundle, bundles
from actors.placement.reservation import Reservation, assigned
from grpo_dist.errors import WorkerLost
from tests.support.plans import config, shape

MIXED = "a" + "b" * 7 + "b" + "a" * 7  # as in https://github.com/ray-project/ray/issues/51117


def row(role, count, gpus=1, cpus=1, **more):
    return [Bundle(role, gpus, cpus, **more)] * count


def homes(wanted, nodes, role, indices):
    """Return the nodes of a role's workers in their order, with how many successive ones each has."""
    taken = [nodes[i] for i, bundle in zip(indices, wanted, strict=True) if bundle.role == role]
    return [(node, len(list(same))) for node, same in groupby(taken)]


def spread(wanted, nodes):
    """Return `homes` of each role; assert that each bundle is assigned once, with the requested size."""
    indices = assigned(wanted, nodes)
    assert sorted(indices) == list(range(len(wanted)))
    assert all(
        (wanted[i].gpus, wanted[i].cpus) == (b.gpus, b.cpus) for i, b in zip(indices, wanted, strict=True)
    )
    return {role: homes(wanted, nodes, role, indices) for role in dict.fromkeys(b.role for b in wanted)}


def test_of_bundles_that_ray_mixed_over_two_nodes_the_policy_gets_all_of_one_node():
    wanted = row("policy", 8) + row("rollout", 8)
    assert assigned(wanted, MIXED) == [0, *range(9, 16), *range(1, 9)]
    assert spread(wanted, MIXED) == {"policy": [("a", 8)], "rollout": [("b", 8)]}
    assert spread(wanted, "ab" * 8) == {"policy": [("a", 8)], "rollout": [("b", 8)]}


def test_a_policy_of_one_and_a_half_of_three_nodes_takes_a_whole_one_first():
    wanted = row("policy", 12) + row("rollout", 12)
    assert spread(wanted, "abc" * 8) == {"policy": [("a", 8), ("b", 4)], "rollout": [("c", 8), ("b", 4)]}


def test_a_node_that_just_suffices_is_taken_before_a_larger_one():
    wanted = row("policy", 4) + row("rollout", 8)
    assert spread(wanted, "a" * 8 + "b" * 4) == {"policy": [("b", 4)], "rollout": [("a", 8)]}
    wanted = row("policy", 10) + row("rollout", 4)  # 8 of 10 leave two
    assert spread(wanted, "a" * 4 + "b" * 8 + "c" * 2) == {
        "policy": [("b", 8), ("c", 2)],
        "rollout": [("a", 4)],
    }


def test_workers_get_bundles_of_the_size_they_asked_for():
    """Engines of 4 GPUs fill a node and a half; 4 of the other bundles are beside them, 8 on a third node."""
    sizes = row("policy", 8) + row("rollout", 3, gpus=4) + row("reference", 4) + row("rewards", 2, gpus=0)
    nodes = "bccbccbb" + "aab" + "cccc" + "ac"
    assert spread(sizes, nodes) == {
        "policy": [("c", 8)], "rollout": [("a", 2), ("b", 1)], "reference": [("b", 4)],
        "rewards": [("a", 1), ("c", 1)],
    }  # fmt: skip
    other_cpus = row("policy", 2, cpus=2) + row("rollout", 2)
    assert assigned(other_cpus, "abba") == [0, 1, 2, 3]


def test_ranks_that_share_sequences_are_on_one_node_where_one_has_room():
    """On nodes with room for 6, groups of 4 share a sequence: in node order the second group would be on two
    nodes. Only the third has to be.
    """
    wanted = row("policy", 12, adjacent=4)
    assert spread(wanted, "ab" * 6)["policy"] == [("a", 4), ("b", 4), ("a", 2), ("b", 2)]
    with_others = row("policy", 8, adjacent=4) + row("rollout", 4)
    assert spread(with_others, "aaaaaabbbbbb") == {
        "policy": [("a", 4), ("b", 4)],
        "rollout": [("a", 2), ("b", 2)],
    }


def test_ranks_with_bundles_of_two_sizes_stay_next_to_each_other():
    """Ranks colocated with a 4-GPU engine, and four more: on the same node, though another has as many."""
    ranks = row("policy", 1, gpus=4, cpus=4, workers=4) + row("policy", 4)
    wanted = ranks + row("evaluation", 4)
    assert spread(wanted, "b" + "abababab") == {"policy": [("b", 5)], "evaluation": [("a", 4)]}


def test_a_role_that_chooses_alone_leaves_the_others_their_bundles():
    """Node a is lost; Ray has moved two of its bundles to c and two to d."""
    wanted = row("policy", 4) + row("rollout", 4)
    first = assigned(wanted, "abababab")
    assert first == [0, 2, 4, 6, 1, 3, 5, 7]
    kept = {i: index for i, index in enumerate(first) if wanted[i].role != "policy"}
    assert assigned(wanted, "cbdbcbdb", kept) == [0, 4, 2, 6, 1, 3, 5, 7]
    assert assigned(wanted, "cbdbcbdb") == [1, 3, 5, 7, 0, 4, 2, 6]  # when all choose again


def tables(monkeypatch, *nodes):
    """Have Ray answer that the bundles are on ``nodes``, one string after the other."""
    answers = iter(nodes)

    def table(group):
        names = next(answers)
        return {"state": "CREATED" if names else "RESCHEDULING", "bundles_to_node_id": dict(enumerate(names))}

    monkeypatch.setattr(reservation, "_POLL_S", 0.0)
    monkeypatch.setattr(reservation, "placement_group_table", table)


def indices(reserved, role):
    return [p["scheduling_strategy"].placement_group_bundle_index for p in reserved.options(role)]


def test_a_reservation_assigns_its_bundles_whenever_ray_has_placed_them(monkeypatch):
    tables(monkeypatch, "", "abab", "", "bbaa", "cbab")
    reserved, cluster_config = Reservation(row("policy", 2) + row("rollout", 2), "group"), config().cluster
    asyncio.run(reserved.wait_ready(cluster_config))
    assert (indices(reserved, "policy"), indices(reserved, "rollout")) == ([0, 2], [1, 3])
    asyncio.run(reserved.wait_ready(cluster_config, only="policy"))
    assert (indices(reserved, "policy"), indices(reserved, "rollout")) == ([0, 2], [1, 3])
    asyncio.run(reserved.wait_ready(cluster_config))
    assert (indices(reserved, "policy"), indices(reserved, "rollout")) == ([1, 3], [0, 2])


def test_workers_with_shares_follow_their_gpu(monkeypatch):
    models = [{"name": name, "path": "x", "gpu_share": 0.5, "num_workers": 2} for name in "mn"]
    run_config = shape(2, 1, where="separate", rewards={"models": models})
    wanted = [
        b
        for b in bundles(placement(run_config, Resources(64, 8, shared=True), training=True))
        if b.role in ("policy", "reward_models")
    ]
    tables(monkeypatch, "abab")
    reserved = Reservation(wanted, "group")
    asyncio.run(reserved.wait_ready(run_config.cluster))
    assert Counter(indices(reserved, "reward_models")) == {2: 2, 3: 2}
    assert indices(reserved, "reward_models") == [2, 3, 2, 3]  # a copy of each model on each GPU


class _Policy:
    team = None

    async def shutdown(self):
        pass


class _Moved:
    """A reservation some of whose bundles Ray moves."""

    is_held = True

    def __init__(self):
        self.calls = []

    async def wait_ready(self, cluster, *, only=None):
        self.calls.append(only)

    def release(self):
        pass


def test_ranks_that_restart_alone_keep_the_policys_bundles_and_a_full_restart_reassigns_all(monkeypatch):
    run_cluster, policy = cluster.Cluster(config()), _Policy()
    run_cluster._factory.reservation = moved = _Moved()
    run_cluster._handles, run_cluster._parts = [policy], TrainingActors(policy, None, None, None)

    def lose_rank(model_dir):
        assert moved.calls == ["policy"]
        raise WorkerLost("a rank")

    async def start_training(model_dir):
        await run_cluster._reserve(training=True)

    monkeypatch.setattr(run_cluster, "_create_policy", lose_rank)
    monkeypatch.setattr(run_cluster, "start_training", start_training)
    asyncio.run(run_cluster.start_again("model"))
    assert moved.calls == ["policy", None]
