"""User estimators, losses, KL and aggregations: numbers by hand, without masked or unscored values."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from grpo_dist.batch.credit_assignment import _user_inputs, sample_advantages, token_advantages
from grpo_dist.batch.rows import make_batch
from grpo_dist.batch.signal import trains_all_rows
from grpo_dist.plugins.user_code import call, check_signature
from grpo_dist.policy.loss import add_stats, batch_loss, finish_stats
from tests.support import fakes
from tests.support.losses import credit, objective, train_batch
from tests.support.made_groups import group_of

PIECES = """
import torch

def centred(rewards, group_ids, scale=1.0):
    out = torch.zeros_like(rewards)
    for group in group_ids.unique():
        own = group_ids == group
        out[own] = (rewards[own] - rewards[own].nanmean()) * scale
    return out

def per_token(rewards, lengths, truncated, parts):
    return (parts["form"] / lengths) * ~truncated

def vanilla(logprobs, old_logprobs, advantages, *, factor=1.0):
    return -factor * torch.exp(logprobs - old_logprobs) * advantages

def to_engine(logprobs, rollout_logprobs, advantages):
    return -torch.exp(logprobs - rollout_logprobs) * advantages

def absolute(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).abs()

def total(token_losses, num_sequences):
    return token_losses.sum() / num_sequences

def short(advantages):
    return advantages[:, 1:]

def whole(mask):
    return mask.long()

def nothing(rewards):
    return None

def infinite(rewards):
    return rewards / 0
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pieces")
    (directory / "algorithm_pieces_of_a_user.py").write_text(PIECES)
    return str(directory)


def user(name: str) -> str:
    return f"algorithm_pieces_of_a_user:{name}"


def row(**changes):
    """Return a prompt of one token with a completion of three, the last masked and NaN."""
    nan = math.nan
    fields = {
        "mask": torch.tensor([[False, True, True, False]]),
        "advantages": torch.tensor([[0.0, 2, -3, nan]]),
        "rollout_logprobs": torch.tensor([[0.0, -1, -2, nan]]),
        "ref_logprobs": torch.tensor([[0.0, -1.5, -1, nan]]),
        "old_logprobs": torch.tensor([[0.0, -1, -3, nan]]),
        "max_tokens": 10,
        "sizes": {"sequences": 4.0},
    }
    return train_batch(**(fields | changes))


def loss_and_gradient(batch, settings, logprobs):
    logprobs = logprobs.clone().requires_grad_()
    loss, stats = batch_loss(logprobs, batch, settings)
    loss.backward()
    return loss.item(), logprobs.grad, finish_stats(stats)


LOGPROBS = torch.tensor([[0.0, -1, -2, -4]])


def test_an_own_loss_gives_the_numbers_worked_by_hand(code):
    settings = objective(loss={"name": user("vanilla"), "kwargs": {"factor": 0.5}}, code_paths=[code])
    loss, gradient, metrics = loss_and_gradient(row(), settings, LOGPROBS)
    # Ratios 1 and e; -0.5 (1 * 2 + e * -3) / 2 tokens.
    assert loss == pytest.approx((-2 + 3 * math.e) / 4)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.5, 0.75 * math.e, 0.0]]))
    assert metrics["policy/ratio_max"] == pytest.approx(math.e) and metrics["policy/clip_high_share"] == 0.0


def test_an_own_loss_may_use_the_engines_log_probs(code):
    loss, _, _ = loss_and_gradient(row(), objective(loss=user("to_engine"), code_paths=[code]), LOGPROBS)
    assert loss == pytest.approx((-2 + 3) / 2)  # both ratios 1


def test_an_own_kl_and_aggregation_give_the_numbers_worked_by_hand(code):
    settings = objective(
        loss=user("vanilla"), kl={"coef": 0.1, "estimator": user("absolute")}, aggregation=user("total"),
        code_paths=[code],
    )  # fmt: skip
    loss, gradient, metrics = loss_and_gradient(row(), settings, LOGPROBS)
    assert loss == pytest.approx((-2 + 3 * math.e) / 4 + 0.1 * (0.5 + 1.0) / 4)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, (-2 + 0.1) / 4, (3 * math.e - 0.1) / 4, 0.0]]))
    assert metrics["ref/kl"] == pytest.approx(0.75)


def test_own_pieces_add_up_over_any_split_of_the_rows(code):
    torch.manual_seed(0)
    shape, mask = (6, 5), torch.rand(6, 5) > 0.3
    batch = row(
        mask=mask, advantages=torch.randn(shape), rollout_logprobs=-torch.rand(shape),
        ref_logprobs=-torch.rand(shape), old_logprobs=-torch.rand(shape), sizes={"sequences": 6.0},
    )  # fmt: skip
    logprobs = -torch.rand(shape)
    settings = objective(
        loss=user("vanilla"), kl={"coef": 0.1, "estimator": user("absolute")}, aggregation=user("total"),
        code_paths=[code],
    )  # fmt: skip
    total, gradient, _ = loss_and_gradient(batch, settings, logprobs)
    parts = [([0, 1], logprobs[:2]), ([2, 3, 4, 5], logprobs[2:])]
    split = [loss_and_gradient(batch.select(rows), settings, part_logprobs) for rows, part_logprobs in parts]
    assert sum(loss for loss, _, _ in split) == pytest.approx(total, rel=1e-6)
    torch.testing.assert_close(torch.cat([g for _, g, _ in split]), gradient)
    stats = [batch_loss(part_logprobs, batch.select(rows), settings)[1] for rows, part_logprobs in parts]
    assert add_stats(*stats)["tokens"] == mask.sum()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "short"}, r"policy loss .*short returned shape \[1, 3\]; expected \[1, 4\]"),
        ({"loss": "whole"}, r"returned a tensor of torch\.int64; expected a tensor of floats"),
        ({"aggregation": "short"}, "missing"),
    ],
)
def test_a_result_of_another_shape_is_refused(code, settings, message):
    named = {key: user(name) for key, name in settings.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        loss_and_gradient(row(), objective(code_paths=[code], **named), LOGPROBS)


def test_an_own_estimator_gets_rewards_lengths_and_parts(code):
    groups = [group_of([1.0, 0.0, np.nan], [1, 2, 3]), group_of([0.0, 3.0, 3.0], [4, 5, 6])]
    settings = credit(user("centred"), kwargs={"scale": 2.0}, code_paths=[code])
    first, second = sample_advantages(groups, settings)
    np.testing.assert_allclose(first, [1.0, -1.0, 0.0])  # the unscored one has 0
    np.testing.assert_allclose(second, [-4.0, 2.0, 2.0])
    group = group_of([1.0, 0.5], [2, 4], parts={"form": np.array([3.0, 2.0])}, reasons=["stop", "length"])
    (advantages,) = sample_advantages([group], credit(user("per_token"), code_paths=[code]))
    np.testing.assert_allclose(advantages, [1.5, 0.0])


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "returned 'NoneType'"), ("infinite", "scored sample is not finite")]
)
def test_an_own_estimator_must_give_a_finite_number_to_each_scored_sample(code, name, message):
    groups = [group_of([1.0, 2.0], [1, 1])]
    with pytest.raises(ValueError, match=message):
        sample_advantages(groups, credit(user(name), code_paths=[code]))


def test_an_own_kl_works_in_the_rewards_too(code):
    groups = [group_of([1.0, 0.0], [2, 3])]
    plain = credit("dr_grpo", kl_coef=0.5, kl={"estimator": "k1"})
    refs = [np.full(len(r.completion_ids), -3.0, np.float32) for g in groups for r in g.rollouts]

    def compute(settings):
        advantages = sample_advantages(groups, settings)
        batch = make_batch(groups, advantages, ref_logprobs=refs, max_new_tokens=10)
        return token_advantages(batch, groups, settings).policy.advantages

    absolute = compute(credit("dr_grpo", kl_coef=0.5, kl={"estimator": user("absolute")}, code_paths=[code]))
    assert not torch.equal(absolute, torch.zeros_like(absolute))
    torch.testing.assert_close(absolute, compute(plain))  # all differences are positive here


@dataclass(frozen=True)
class Inputs:
    a: int = 1
    b: int = 2


def takes(a, beta: float, *, flag: bool = False):
    return a, beta, flag


def test_a_piece_is_called_with_the_inputs_that_it_names():
    assert call(takes, Inputs(), {"beta": 3}) == (1, 3, False)
    assert call(lambda **all_of_them: all_of_them, Inputs(), {"c": 4}) == {"a": 1, "b": 2, "c": 4}
    check_signature(takes, Inputs, {"beta": 3}, "loss takes", "kwargs.loss")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"needs `beta`, which is no input of its kind \(a, b\).*set `kwargs.loss.beta`"),
        ({"beta": 1.0, "gama": 2}, r"`kwargs.loss.gama`: .* no such argument; it takes beta, flag"),
        ({"beta": 1.0, "a": 2}, r"`kwargs.loss.a`: the run gives loss takes this input"),
        ({"beta": True}, r"`kwargs.loss.beta`: loss takes expects float, and bool is given"),
        ({"beta": 1.0, "flag": 1}, r"`kwargs.loss.flag`: loss takes expects bool, and int is given"),
    ],
)
def test_arguments_are_held_against_the_signature(kwargs, message):
    with pytest.raises(ValueError, match=message):
        check_signature(takes, Inputs, kwargs, "loss takes", "kwargs.loss")


def test_an_own_estimator_gets_nan_where_a_source_has_no_such_reward():
    groups = [group_of([1, 0], [1, 1], parts={name: np.array([1.0, 0.0])}) for name in ("math", "code")]
    settings = credit(weights={"math": 1.0, "code": 1.0})
    inputs = _user_inputs(torch.tensor([1.0, 0, 1, 0]), torch.tensor([0, 0, 1, 1]), groups, settings)
    nan = float("nan")
    expected = {"math": [1.0, 0.0, nan, nan], "code": [nan, nan, 1.0, 0.0]}
    assert list(inputs.parts) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(inputs.parts[name], torch.tensor(values).double(), equal_nan=True)


@pytest.mark.parametrize("key", ["loss", "aggregation"])
def test_rows_without_an_advantage_stay_under_an_own_loss_or_aggregation(key):
    assert trains_all_rows(fakes.config(algorithm={key: "mine:f"}).algorithm, has_kl_term=False)
    assert not trains_all_rows(fakes.config().algorithm, has_kl_term=False)
