"""Spare resources for guest engines."""

from types import SimpleNamespace

import pytest

from actors.factory import Factory
from actors.lifecycle.team import GuestSpec
from actors.placement import elasticity
from actors.placement.demands import Demand, Resources, placement, uncounted_threads
from actors.placement.elasticity import pick
from actors.placement.reservation import Reservation
from tests.support import fakes

GPUS = {"a": (2.0, 8.0), "b": (1.0, 8.0), "c": (4.0, 1.0)}


def test_guests_go_to_the_fullest_nodes_that_have_all_they_take():
    assert pick(GPUS, 1, 1, 10) == ["b", "a", "a", "c"]  # c has four GPUs and one CPU
    assert pick(GPUS, 0, 2, 10) == ["a", "c", "c"]
    assert pick(GPUS, 0, 2, 1) == ["a"]
    assert pick(GPUS, 0, 5, 1) == []


def test_cores_that_ray_has_as_free_while_the_run_computes_on_them_are_no_room(monkeypatch):
    laptop = {"a": (0.0, 8.0)}
    assert pick(laptop, 1, 0, 7) == ["a"] * 7
    has = {"a": {"CPU": 8.0}, "policy": {"CPU": 4.0}, "gone": {"CPU": 9.0}, "drained": {"CPU": 9.0}}
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: has)
    nodes = [{"NodeID": node, "Alive": node != "gone"} for node in has]
    monkeypatch.setattr(elasticity, "ray", SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(elasticity, "draining", lambda: {"drained": 60.0})
    assert elasticity.rooms(1, 0, 7, in_use={}) == ["policy"] * 4 + ["a"] * 3
    assert elasticity.rooms(1, 0, 7, in_use={"policy": 3}) == ["policy"] + ["a"] * 6
    assert elasticity.rooms(1, 0, 9, in_use={"policy": 4, "a": 1}) == ["a"] * 7
    assert elasticity.rooms(2, 0, 7, in_use={"policy": 9, "a": 5}) == ["a"]


def elastic(**changes):
    settings = {"rollout": {"num_workers": {"min": 1, "max": 8}, "threads": 1}, "policy": {"threads": 4}}
    return fakes.config(cluster={"placement": "separate"}, **settings | changes)


@pytest.mark.parametrize(
    ("shared", "cpus", "uncounted"),
    [
        (False, 8, {"rollout": 1, "policy": 4}),  # a private Ray, where nothing is reserved
        (True, 8, {}),  # a shared Ray, which counts
        (True, 4, {"rollout": 1, "policy": 4}),  # too few to reserve
    ],
)
def test_guests_find_room_beside_the_threads_of_the_actors_that_ray_does_not_count(shared, cpus, uncounted):
    config = elastic()
    demands = placement(config, Resources(cpus=cpus, gpus=0, shared=shared), training=True)
    assert Factory(config, demands, Reservation([], None)).guests() == GuestSpec(7, 1, 0)
    assert uncounted_threads(demands) == uncounted


def test_evaluation_engines_compute_on_cores_too_and_engines_on_gpus_need_none():
    computing = {"rollout": Demand(1, 0, 1), "policy": Demand(2, 0, 4), "evaluation": Demand(2, 0, 3)}
    counted = {"rollout": 1, "policy": 4, "evaluation": 3}
    assert uncounted_threads(computing | {"rewards": Demand(4, 0, 1)}) == counted
    config = elastic()
    demands = placement(config, Resources(cpus=16, gpus=8), training=True)
    guests = Factory(config, demands, Reservation([], None)).guests()
    assert guests.gpus == 1 and uncounted_threads(demands) == {}
