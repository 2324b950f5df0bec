"""`rollout.num_workers` as a range: engines join up to `max_workers`."""

import pytest
from pydantic import ValidationError

from actors.factory import Factory
from actors.lifecycle.team import GuestSpec
from actors.placement.demands import Resources, is_colocated, placement
from actors.placement.reservation import Reservation
from grpo_dist.config import RolloutConfig
from grpo_dist.config.files import changed, dump_config, load_config
from grpo_dist.errors import UserError
from tests.support.plans import shape

DELTAS = {"rollout.max_workers": 5, "weight_sync.deltas": True}


def test_a_range_sets_the_reserved_and_the_maximum_engines():
    ranged = RolloutConfig.model_validate({"num_workers": {"min": 2, "max": 5}})
    assert (ranged.num_workers, ranged.max_workers, ranged.most_workers, ranged.may_grow) == (2, 5, 5, True)
    plain = RolloutConfig(num_workers=2)
    assert (plain.max_workers, plain.most_workers, plain.may_grow) == (None, 2, False)
    assert not RolloutConfig(num_workers=2, max_workers=2).may_grow


def test_a_range_may_be_given_on_the_command_line_and_survives_a_dump(tmp_path):
    loaded = load_config("configs/demo.yaml", ["rollout.num_workers={min: 1, max: 3}"])
    assert loaded.rollout.num_workers == 1 and loaded.rollout.max_workers == 3
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(loaded))
    assert load_config(str(path), []) == loaded


@pytest.mark.parametrize(
    "values",
    [
        {"num_workers": {"min": 3, "max": 2}}, {"num_workers": {"min": 1}}, {"max_workers": 0},
        {"num_workers": {"min": 1, "max": 2, "step": 1}}, {"num_workers": {"min": True, "max": 2}},
        {"num_workers": {"min": 1, "max": 2}, "max_workers": 4}, {"num_workers": 4, "max_workers": 3},
    ],
)  # fmt: skip
def test_a_range_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValidationError) as refused:
        RolloutConfig.model_validate(values)
    assert "workers" in str(refused.value)


def guests(config, has):
    return Factory(config, placement(config, has, training=True), Reservation([], None)).guests()


def test_engines_that_join_colocated_ones_have_separate_devices():
    eight = Resources(cpus=64, gpus=8)
    for where, engines in (("auto", 4), ("colocated", 2)):
        config = changed(shape(8, engines, 2, where=where), {"rollout.max_workers": 9})
        assert is_colocated(config, eight)
        assert guests(config, eight) == GuestSpec(most=9 - engines, cpus=1, gpus=2)


def test_deltas_are_refused_where_some_engines_drop_the_weights_before():
    config = changed(shape(4, 4, where="colocated"), DELTAS)
    with pytest.raises(UserError, match=r"weight_sync.deltas.*rollout.max_workers` = 5.*deltas=false"):
        placement(config, Resources(cpus=64, gpus=8), training=True)
    for fits in ({"rollout.max_workers": 4}, {"cluster.placement": "separate"}):
        placement(changed(config, fits), Resources(cpus=64, gpus=8), training=True)


def test_the_remedy_of_a_refusal_of_deltas_is_not_refused_itself():
    config, four = changed(shape(4, 4, where="colocated"), DELTAS), Resources(cpus=64, gpus=4)
    with pytest.raises(UserError) as refused:
        placement(config, four, training=True)
    assert "deltas=false" in str(refused.value) and "separate" not in str(refused.value)
    with pytest.raises(UserError, match=r"set weight_sync.deltas=False cluster.placement=colocated, or"):
        placement(changed(config, {"cluster.placement": "separate"}), four, training=True)
