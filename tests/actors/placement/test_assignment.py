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
    own = [nodes[i] for i, bundle in zip(indices, wanted, strict=True) if bundle.role == role]
    return [(node, len(list(same))) for node, same in groupby(own)]


def spread(wanted, nodes):
    """Return `homes` of each role; every bundle is someone's, and has the size that was asked for."""
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
    assert spread(wanted, "abc" * 8) == {
        "policy": [("a", 8), ("b", 4)],
        "rollout": [("c", 8), ("b", 4)],
    }


def test_a_node_that_just_suffices_is_taken_before_a_larger_one():
    wanted = row("policy", 4) + row("rollout", 8)
    assert spread(wanted, "a" * 8 + "b" * 4) == {"policy": [("b", 4)], "rollout": [("a", 8)]}
    wanted = row("policy", 10) + row("rollout", 4)  # the rest of ten is two
    assert spread(wanted, "a" * 4 + "b" * 8 + "c" * 2) == {
        "policy": [("b", 8), ("c", 2)],
        "rollout": [("a", 4)],
    }


def test_workers_get_bundles_of_the_size_they_asked_for():
    """Engines of 4 GPUs fill a node and a half; of the others' bundles 4 are beside them, 8 on a third."""
    sizes = row("policy", 8) + row("rollout", 3, gpus=4) + row("reference", 4) + row("rewards", 2, gpus=0)
    nodes = "bccbccbb" + "aab" + "cccc" + "ac"
    assert spread(sizes, nodes) == {
        "policy": [("c", 8)],
        "rollout": [("a", 2), ("b", 1)],
        "reference": [("b", 4)],
        "rewards": [("a", 1), ("c", 1)],
    }
    other_cpus = row("policy", 2, cpus=2) + row("rollout", 2)
    assert assigned(other_cpus, "abba") == [0, 1, 2, 3]


def test_ranks_that_share_sequences_are_on_one_node_where_one_has_room():
    """Nodes with room for 6, of which 4 share a sequence: in the order of nodes the second group would be on
    both. Only the third has to be.
    """
    wanted = row("policy", 12, adjacent=4)
    assert spread(wanted, "ab" * 6)["policy"] == [("a", 4), ("b", 4), ("a", 2), ("b", 2)]
    with_others = row("policy", 8, adjacent=4) + row("rollout", 4)
    assert spread(with_others, "aaaaaabbbbbb") == {
        "policy": [("a", 4), ("b", 4)],
        "rollout": [("a", 2), ("b", 2)],
    }


def test_ranks_with_bundles_of_two_sizes_stay_next_to_each_other():
    """Ranks below an engine of four GPUs, and four more: on the same node, though another has as many."""
    ranks = row("policy", 1, gpus=4, cpus=4, workers=4) + row("policy", 4)
    wanted = ranks + row("evaluation", 4)
    assert spread(wanted, "b" + "abababab") == {"policy": [("b", 5)], "evaluation": [("a", 4)]}


def test_a_role_that_chooses_alone_leaves_the_others_their_bundles():
    """Ranks on a have lost it; Ray has put their bundles on c and, two of them, on d."""
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
        own = next(answers)
        return {"state": "CREATED" if own else "RESCHEDULING", "bundles_to_node_id": dict(enumerate(own))}

    monkeypatch.setattr(reservation, "_POLL_S", 0.0)
    monkeypatch.setattr(reservation, "placement_group_table", table)


def indices(made, role):
    return [p["scheduling_strategy"].placement_group_bundle_index for p in made.options(role)]


def test_a_reservation_assigns_its_bundles_whenever_ray_has_placed_them(monkeypatch):
    tables(monkeypatch, "", "abab", "", "bbaa", "cbab")
    made, cluster_config = Reservation(row("policy", 2) + row("rollout", 2), "group"), config().cluster
    asyncio.run(made.wait_ready(cluster_config))
    assert (indices(made, "policy"), indices(made, "rollout")) == ([0, 2], [1, 3])
    asyncio.run(made.wait_ready(cluster_config, only="policy"))
    assert (indices(made, "policy"), indices(made, "rollout")) == ([0, 2], [1, 3])
    asyncio.run(made.wait_ready(cluster_config))
    assert (indices(made, "policy"), indices(made, "rollout")) == ([1, 3], [0, 2])


def test_workers_with_shares_follow_their_gpu(monkeypatch):
    models = [{"name": name, "path": "x", "gpu_share": 0.5, "num_workers": 2} for name in "mn"]
    asked = shape(2, 1, where="separate", rewards={"models": models})
    wanted = [
        b
        for b in bundles(placement(asked, Resources(64, 8, shared=True), training=True))
        if b.role in ("policy", "reward_models")
    ]
    tables(monkeypatch, "abab")
    made = Reservation(wanted, "group")
    asyncio.run(made.wait_ready(asked.cluster))
    assert Counter(indices(made, "reward_models")) == {2: 2, 3: 2}
    assert indices(made, "reward_models") == [2, 3, 2, 3]  # a copy of each model on each GPU


class _Policy:
    team = None

    async def shutdown(self):
        pass


class _Moved:
    """A reservation some of whose bundles Ray moves."""

    is_held = True

    def __init__(self):
        self.asked = []

    async def wait_ready(self, cluster, *, only=None):
        self.asked.append(only)

    def release(self):
        pass


def test_ranks_that_restart_alone_choose_among_their_own_bundles_and_all_choose_when_all_do(monkeypatch):
    own, policy = cluster.Cluster(config()), _Policy()
    own._factory.reservation = moved = _Moved()
    own._handles, own._parts = [policy], TrainingActors(policy, None, None, None)

    def lost(model_dir):
        assert moved.asked == ["policy"]
        raise WorkerLost("a rank")

    async def start_training(model_dir):
        await own._reserve(training=True)

    monkeypatch.setattr(own, "_create_policy", lost)
    monkeypatch.setattr(own, "start_training", start_training)
    asyncio.run(own.start_again("model"))
    assert moved.asked == ["policy", None]
