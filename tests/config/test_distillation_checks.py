"""Settings of teachers that contradict others, or that a run would ignore, are refused by key."""

import pytest
from pydantic import ValidationError

from tests.support import fakes

OWN, REFERENCE = {"name": "large", "model": "/elsewhere"}, {"name": "self", "model": "reference"}
WITHOUT_REWARDS = {"teachers": [OWN], "reward_coef": 0}
WHITENED = {"advantage": "reinforce_pp", "kl": {"coef": 0.1, "in_reward": True}}
POOLS = {"train": [{"path": "demo:add3"}], "order": "pools"}
SHOWN = {"data": "shown.jsonl", "rows_per_step": 4}


def alone(**changes):
    """Return the section of a reference that teaches without rewards."""
    return {"distillation": {"teachers": [REFERENCE | changes], "reward_coef": 0}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (alone(), ["self", "`distillation.reward_coef` = 0", "teaches itself", "`prompt`"]),
        (alone() | {"reference": {"refresh_every": 2}}, ["teaches itself"]),
        (alone() | {"algorithm": {"kl": {"coef": 0.1}}}, ["teaches itself"]),
        (
            {"distillation": WITHOUT_REWARDS, "data": POOLS},
            ["`data.order` = pools", "`distillation.reward_coef` = 0", "epochs"],
        ),
        (
            {"distillation": WITHOUT_REWARDS, "data": {**POOLS, "order": "pass_rate"}},
            ["`data.order` = pass_rate"],
        ),
        (
            {"distillation": {"teachers": [OWN], "reward_coef": 0.5}, "algorithm": WHITENED},
            ["`distillation.reward_coef` = 0.5", "`algorithm.kl.in_reward`", "`algorithm.advantage.whiten`"],
        ),
        (
            {"distillation": {"teachers": [REFERENCE | {"num_workers": 3}]}},
            ["self: `num_workers` = 3", "set `reference.num_workers`"],
        ),
        ({"distillation": {"teachers": [REFERENCE | {"revision": "v1"}]}}, ["self: `revision` = v1"]),
        ({"distillation": {"reward_coef": 0}}, ["`distillation.reward_coef` = 0: has no effect"]),
        ({"distillation": {"kl": "sampled"}}, ["`distillation.kl` = ", "has no effect without a teacher"]),
        *(
            (
                {"distillation": {"teachers": two, "kl": "top_k"}},
                ["large and self both teach", said, "name other `sources`"],
            )
            for two, said in (
                ([OWN, REFERENCE], "the same source"),
                ([OWN | {"sources": ["a", "b"]}, REFERENCE | {"sources": ["b", "c"]}], "both teach b"),
            )
        ),
    ],
)
def test_a_contradiction_is_refused_with_key_and_remedy(changes, words):
    with pytest.raises(ValidationError) as refusal:
        fakes.config(**changes)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        alone(prompt="{problem} {answer}"),
        alone() | {"demonstrations": SHOWN},
        alone() | {"algorithm": {"entropy": {"coef": 0.01}}},
        alone() | {"algorithm": {"entropy": {"kind": "adaptive", "target": 0.5}}},  # its weight starts at 0
        {"distillation": {"teachers": [OWN, REFERENCE], "reward_coef": 0}},
        {"distillation": {"teachers": [REFERENCE], "reward_coef": 0.1}},
        {"distillation": {"teachers": [REFERENCE | {"num_workers": 1}]}},
        {"distillation": {"teachers": [OWN], "reward_coef": 0.1}, "data": POOLS},
        {"distillation": {"teachers": [OWN]}, "algorithm": WHITENED},
        {
            "distillation": {
                "teachers": [OWN | {"sources": ["a"]}, REFERENCE | {"sources": ["b"]}],
                "kl": {"name": "top_k", "divergence": "jensen_shannon"},
            }
        },
        {
            "distillation": {"teachers": [OWN], "reward_coef": 0.5},
            "algorithm": WHITENED | {"advantage": {"name": "reinforce_pp", "whiten": False}},
        },
        {
            "distillation": {"teachers": [OWN], "reward_coef": 0.5},
            "algorithm": WHITENED | {"kl": {"coef": 0.1}},
        },
    ],
)
def test_what_still_learns_is_not_refused(changes):
    fakes.config(**changes)
