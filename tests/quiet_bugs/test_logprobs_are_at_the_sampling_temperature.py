"""trl#4159, "vLLM not computing correct log probs when using GRPO with =/=1 temperature", trl#3029 and
prime-rl#697, "Fix temperature scaling of vLLM logprobs": one side had log-probs of temperature 1, or
divided the log-prob itself by the temperature, which gives no log-prob.

trl#4159 shows a first-token ratio of 2 at temperature 0.6 where nothing has moved.
"""

import pytest
import torch

from grpo_dist.policy.logprobs import token_logprobs

TEMPERATURE, WIDTH, TOKENS = 0.6, 8, 4


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, TOKENS, WIDTH, generator=generator)
    weight = torch.randn(31, WIDTH, generator=generator)
    tokens = torch.randint(0, 31, (1, TOKENS), generator=generator)
    return hidden, weight, tokens


def sampled_from(model):
    """Return an engine's log-probs [3] of all tokens but the first, and the distributions behind them."""
    hidden, weight, tokens = model
    logprobs = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)[0, :-1]
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0], logprobs


def test_the_bug_takes_the_difference_of_temperatures_for_a_ratio(model):
    engine, logprobs = sampled_from(model)
    hidden, weight, tokens = model
    raw_all = (hidden @ weight.T).log_softmax(-1)[0, :-1]
    raw = raw_all.gather(1, tokens[0, 1:, None])[:, 0]
    assert ((raw - engine).exp() - 1).abs().max() > 0.5
    scaled = raw_all / TEMPERATURE  # the second bug: these are no log-probs
    assert (logprobs.exp().sum(-1) - 1).abs().max() < 1e-5
    assert scaled.exp().sum(-1).max() < 0.5


def test_the_ratio_of_a_policy_to_itself_is_1(model):
    hidden, weight, tokens = model
    mask = torch.tensor([[False, True, True, True]])
    ours, _ = token_logprobs(hidden, weight, tokens, temperature=TEMPERATURE, chunk_tokens=2, mask=mask)
    engine, _ = sampled_from(model)
    torch.testing.assert_close(ours[0, 1:], engine, rtol=1e-5, atol=1e-5)
    assert ours[0, 0] == 0
