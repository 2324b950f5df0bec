"""The aggregation modes: golden values, and partial sums of any split add up to the whole."""

import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES, aggregate
from tests.support.numbers_by_hand import NAN, mask_of

LENGTHS = [5, 3, 1, 4, 2, 5, 2, 3]
GOLDEN = {
    "token-mean": 1.7960,
    "token-sum": 44.9,
    "seq-mean-token-mean": 1.85625,
    "seq-mean-token-sum": 5.6125,
    "seq-mean-token-sum-norm": 1.12250,
    "prompt-mean-token-mean": 1.85625,  # one sequence per prompt
}


@pytest.mark.parametrize(("mode", "expected"), GOLDEN.items())
@pytest.mark.parametrize("number", [float, int])
def test_aggregation_has_its_golden_values(mode, expected, number):
    losses = torch.arange(40.0).view(8, 5) / 10
    value = aggregate(
        losses, mask_of(LENGTHS, 5), mode, num_tokens=number(25), num_sequences=number(8), max_tokens=5
    )
    assert float(value) == pytest.approx(expected, rel=1e-6)


def test_the_tokens_of_a_prompt_are_averaged_first_and_then_the_prompts():
    """Two prompts. The first has token losses 1 to 4 in a long sequence and 10 in a short one, mean 4; the
    second 6 and 8, mean 7: 5.5 over both. By sequence it would be (2.5 + 10 + 6 + 8) / 4 = 6.625.
    """
    losses = torch.tensor([[1.0, 2, 3, 4], [10, 0, 0, 0], [6, 0, 0, 0], [8, 0, 0, 0]])
    how = {"num_tokens": 7, "num_sequences": 4, "max_tokens": 4}
    prompts = {"num_prompts": 2, "prompt_tokens": torch.tensor([5, 5, 2, 2])}
    mask = mask_of([4, 1, 1, 1], 4)
    assert float(aggregate(losses, mask, "prompt-mean-token-mean", **how, **prompts)) == 5.5
    assert float(aggregate(losses, mask, "seq-mean-token-mean", **how, **prompts)) == 6.625
    cut = [
        aggregate(losses[i], mask[i], "prompt-mean-token-mean", num_prompts=2,
                  prompt_tokens=prompts["prompt_tokens"][i], **how)
        for i in ([0, 3], [1, 2])
    ]  # fmt: skip
    assert float(sum(cut)) == 5.5


@pytest.mark.parametrize("mode", MODES)
def test_partial_sums_over_any_split_add_up_to_the_whole(mode):
    generator = torch.Generator().manual_seed(2)
    losses = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = mask_of(LENGTHS, 5)
    how = {"num_tokens": 25.0, "num_sequences": 8.0, "max_tokens": 5}
    whole = aggregate(losses, mask, mode, **how)
    for cut in range(9):
        parts = [aggregate(losses[rows], mask[rows], mode, **how) for rows in (slice(cut), slice(cut, None))]
        assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_step_has_zero_loss_and_gradient(mode):
    losses = torch.full((3, 4), NAN, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    value = aggregate(losses, mask, mode, num_tokens=0.0, num_sequences=0.0, max_tokens=4)
    value.backward()
    assert value.item() == 0.0 and torch.equal(losses.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_without_tokens_does_not_count(mode):
    losses = torch.arange(12.0).view(3, 4)
    mask = mask_of([2, 0, 3], 4)
    how, rows = {"num_tokens": 5.0, "num_sequences": 2.0, "max_tokens": 4}, [0, 2]
    without = aggregate(losses[rows], mask[rows], mode, **how)
    assert float(aggregate(losses, mask, mode, **how)) == float(without)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(
        ValueError, match="'mean': expected one of token-mean, token-sum, seq-mean-token-mean"
    ):
        aggregate(
            torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), "mean",
            num_tokens=1.0, num_sequences=1.0, max_tokens=1,
        )  # fmt: skip
