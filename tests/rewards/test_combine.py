"""Weights and gates, with numbers worked by hand."""

import numpy as np
import pytest

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.scorer import combine, to_part
from tests.support.made_completions import term

NAN = float("nan")


def total(terms, **parts):
    return combine({name: np.array(values, np.float32) for name, values in parts.items()}, terms)


def test_a_closed_gate_counts_zero_and_an_unknown_one_nan():
    terms = [term("math", 1.0), term("short", 2.0, gate="math")]
    result = total(terms, math=[1, 0, NAN, 1], short=[-0.5, -0.5, -0.5, 0.25])
    np.testing.assert_array_equal(result, [0.0, 0.0, NAN, 1.5])


def test_a_gate_at_its_threshold_is_closed():
    terms = [term("a", 0.0), term("b", 1.0, gate="a", gate_above=0.5)]
    assert total(terms, a=[0.5, 0.51, 0.4], b=[1, 1, 1]).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("threshold", [0.6, 0.1, 0.7])
def test_a_part_is_compared_with_the_threshold_in_float32(threshold):
    """0.6 as a float32 is above 0.6, 0.7 is below."""
    terms = [term("a", 0.0), term("b", 1.0, gate="a", gate_above=threshold)]
    just_above = np.nextafter(np.float32(threshold), np.float32(1))
    assert total(terms, a=[threshold, just_above], b=[1, 1]).tolist() == [0.0, 1.0]


def test_an_unscored_part_of_weight_zero_matters_only_as_a_gate():
    np.testing.assert_array_equal(total([term("a"), term("b", 0.0)], a=[1], b=[NAN]), [1.0])
    gated = [term("a", gate="b"), term("b", 0.0)]
    np.testing.assert_array_equal(total(gated, a=[1], b=[NAN]), [NAN])


def test_chained_gates_compare_gated_values():
    """c counts where b counts and is above 0; b counts where a is above 0."""
    terms = [term("a", 0.0), term("b", 0.0, gate="a"), term("c", 1.0, gate="b")]
    assert total(terms, a=[1, 0, 1], b=[1, 1, 0], c=[5, 5, 5]).tolist() == [5.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([{"function": "math", "gate": "maths"}], ["gate = maths", "of reward math", "expected one of math"]),
        ([{"function": "math", "gate": "math"}], ["cycle", "math -> math"]),
        (
            [
                {"function": "math"},
                {"name": "a", "function": "format", "gate": "b"},
                {"name": "b", "function": "exact", "gate": "a"},
            ],
            ["cycle", "a -> b -> a"],
        ),
        ([], ["no functions and no models"]),
    ],
)
def test_unknown_and_circular_gates_are_rejected(functions, words):
    with pytest.raises(ValueError) as refusal:
        RewardsConfig.model_validate({"functions": functions})
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_reward_may_be_gated_by_a_model():
    model = {"name": "quality", "path": "somewhere", "gate": "math"}
    settings = RewardsConfig.model_validate(
        {"functions": [{"function": "math"}, {"function": "format", "gate": "quality"}], "models": [model]}
    )
    assert settings.functions[1].gate == "quality" and settings.models[0].gate == "math"


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf"), 1e39])
def test_a_value_that_is_not_a_finite_float32_is_unscored(bad):
    parts = {"a": np.array([bad, 1.0]), "b": np.array([1.0, 1.0])}
    np.testing.assert_array_equal(combine(parts, [term("a"), term("b")]), [NAN, 2.0])
    np.testing.assert_array_equal(to_part([bad, 1.0, None]), np.array([NAN, 1.0, NAN], np.float32))
    gated = [term("a", 0.0), term("b", gate="a")]
    np.testing.assert_array_equal(combine(parts, gated), [NAN, 1.0])


def test_an_overflow_by_the_weight_is_unscored():
    for weight in (1e30, 1e308):
        result = combine({"a": np.array([1e30, 0.0], np.float32)}, [term("a", weight)])
        np.testing.assert_array_equal(result, [NAN, 0.0])


def test_weights():
    result = total([term("a", 2.0), term("b", -0.5)], a=[1, 0, 0.5], b=[1, 1, 0])
    assert result.dtype == np.float32 and result.tolist() == [1.5, -0.5, 1.0]


def test_a_closed_gate_hides_an_unscored_part():
    terms = [term("math", 1.0), term("short", 2.0, gate="math")]
    np.testing.assert_array_equal(total(terms, math=[1, 0], short=[NAN, NAN]), [NAN, 0.0])
