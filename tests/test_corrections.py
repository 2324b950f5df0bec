"""Importance corrections for samplers that are not quite the policy."""

import pytest
import torch
from numbers_by_hand import INF, close, mask_of, row

from grpo_dist.algorithms.offpolicy import KINDS, LEVELS, correction

RATIOS = row(0.25, 1.0, 1.5, 4.0, 7.0)  # the last is masked
MASK = torch.tensor([[True, True, True, True, False]])


def weights_of(kind, level, low, high):
    zeros = torch.zeros_like(RATIOS)
    return correction(RATIOS.log(), zeros, MASK, kind=kind, level=level, low=low, high=high)


@pytest.mark.parametrize(
    ("kind", "level", "low", "high", "expected", "outside"),
    [
        ("tis", "token", 0.0, 2.0, [0.25, 1.0, 1.5, 2.0, 0.0], 1),
        ("tis", "token", 0.5, 2.0, [0.5, 1.0, 1.5, 2.0, 0.0], 2),
        ("mis", "token", 0.5, 2.0, [0.0, 1.0, 1.5, 0.0, 0.0], 2),
        ("icepop", "token", 0.5, 5.0, [0.0, 1.0, 1.5, 4.0, 0.0], 1),
        # The product is 1.5, the geometric mean 1.5 ** 0.25 = 1.1067.
        ("tis", "sequence", 0, 2, [1.5, 1.5, 1.5, 1.5, 0.0], 0),
        ("tis", "sequence", 0, 1.2, [1.2, 1.2, 1.2, 1.2, 0.0], 4),
        ("mis", "sequence", 0, 1.2, [0.0, 0.0, 0.0, 0.0, 0.0], 4),
        ("mis", "geometric", 0, 1.2, [1.1066819, 1.1066819, 1.1066819, 1.1066819, 0.0], 0),
        ("icepop", "geometric", 0, 1.2, [0.25, 1.0, 1.5, 4.0, 0.0], 0),
        ("icepop", "geometric", 0, 1.1, [0.0, 0.0, 0.0, 0.0, 0.0], 4),
    ],
)
def test_corrections_bound_or_mask_by_token_or_sequence(kind, level, low, high, expected, outside):
    weights, stats = weights_of(kind, level, low, high)
    close(weights, [expected])
    assert int(stats["outside"]) == outside
    by_level = {"token": RATIOS[MASK], "sequence": row(*[1.5] * 4), "geometric": row(*[1.5**0.25] * 4)}
    unbounded = by_level[level]
    assert float(stats["weight"]) == pytest.approx(float(unbounded.sum()))
    assert float(stats["weight_max"]) == pytest.approx(float(unbounded.max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_logprobs_have_weight_one_and_weights_carry_no_gradient(kind, level):
    logprobs = (-torch.rand(2, 6)).requires_grad_()
    mask = mask_of([4, 6], 6)
    weights, _ = correction(
        logprobs, logprobs.detach().clone(), mask, kind=kind, level=level, low=0.5, high=2
    )
    assert torch.equal(weights, mask.float()) and not weights.requires_grad
    assert weights.dtype == torch.float32


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([[0.0, -1e4, 0.0]])
    rollout = torch.tensor([[-1e4, 0.0, -INF]])
    mask = torch.tensor([[True, True, True]])
    weights, _ = correction(logprobs, rollout, mask, kind="tis", level="token", low=0.1, high=2.0)
    close(weights, [[2.0, 0.1, 2.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sis"}, "kind 'sis', level 'token': expected kind tis, mis, icepop"),
        ({"level": "word"}, "level 'word'"),
        ({"low": 2.0, "high": 2.0}, "low = 2.0, high = 2.0: expected 0 <= low < high"),
    ],
)
def test_an_unknown_correction_is_refused(change, message):
    how = {"kind": "tis", "level": "token", "low": 0.0, "high": 2.0} | change
    with pytest.raises(ValueError, match=message):
        correction(RATIOS, RATIOS, MASK, **how)


def test_one_vetoed_token_drops_its_sequence_and_no_other():
    train = torch.log(row(1.0, 0.05, 1.0).repeat(2, 1))
    train[1, 1] = 0.0
    mask = torch.ones(2, 3, dtype=torch.bool)
    how = {"kind": "tis", "level": "token", "low": 0.0, "high": 2.0}
    weights, stats = correction(train, torch.zeros_like(train), mask, **how, veto=0.1)
    close(weights, torch.tensor([[0.0, 0, 0], [1, 1, 1]]))
    assert float(stats["dropped"]) == 3
    weights, _ = correction(train, torch.zeros_like(train), mask, **how, veto=0.01)
    close(weights, train.exp())
    mask[0, 1] = False  # a masked token cannot veto
    weights, stats = correction(train, torch.zeros_like(train), mask, **how, veto=0.1)
    close(weights, torch.tensor([[1.0, 0, 1], [1, 1, 1]]))
    assert float(stats["weight_sq"]) == 5
