"""Log-probs without all the logits at once, against the dense float64 computation."""

import pytest
import torch

from grpo_dist.logprobs import token_logprobs


def dense(hidden, weight, tokens, temperature, bias=None):
    """The definition, in float64: entry t from the hidden state at t - 1; entry 0 is 0."""
    logits = hidden.double() @ weight.double().T
    logits = (logits + bias.double() if bias is not None else logits) / temperature
    log_p = logits.log_softmax(-1)
    values = log_p[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)[:, :-1]
    pad = torch.zeros(len(tokens), 1, dtype=torch.float64)
    return torch.cat([pad, values], 1), torch.cat([pad, entropy], 1)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 8, generator=generator)
    weight, bias = torch.randn(11, 8, generator=generator), torch.randn(11, generator=generator)
    tokens = torch.randint(0, 11, (3, 7), generator=generator)
    mask = torch.rand(3, 7, generator=generator) < 0.6
    mask[:, 0] = False
    return hidden, weight, bias, tokens, mask


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_entropies_and_gradients_are_those_of_the_definition(inputs, temperature, chunk, with_bias):
    hidden, weight, bias, tokens, mask = inputs
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    got, entropy = token_logprobs(
        leaves[0], leaves[1], tokens, temperature=temperature, chunk_tokens=chunk,
        bias=leaves[2] if with_bias else None, with_entropy=True, mask=mask,
    )  # fmt: skip
    exact = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    expected, expected_entropy = dense(
        exact[0], exact[1], tokens, temperature, exact[2] if with_bias else None
    )
    assert torch.allclose(got.double(), torch.where(mask, expected, 0.0), atol=1e-6)
    assert torch.allclose(entropy.double(), torch.where(mask, expected_entropy, 0.0), atol=1e-5)
    pull = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    (got * pull).sum().backward()
    (torch.where(mask, expected, 0.0) * pull).sum().backward()
    for mine, true in zip(leaves[: 2 + with_bias], exact, strict=False):
        assert torch.allclose(mine.grad, true.grad, atol=1e-5)


def test_chunking_changes_nothing(inputs):
    hidden, weight, _, tokens, mask = inputs
    results = [
        token_logprobs(hidden, weight, tokens, temperature=0.9, chunk_tokens=c, mask=mask)[0]
        for c in (1, 3, 100)
    ]
    assert torch.allclose(results[0], results[1], atol=1e-6) and torch.allclose(
        results[1], results[2], atol=1e-6
    )


def test_nothing_wanted_is_zero_and_still_has_a_gradient_of_zero(inputs):
    hidden, weight, _, tokens, mask = inputs
    weight = weight.clone().requires_grad_()
    got, _ = token_logprobs(
        hidden, weight, tokens, temperature=1.0, chunk_tokens=4, mask=torch.zeros_like(mask)
    )
    got.sum().backward()
    assert torch.equal(got, torch.zeros(3, 7)) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_bfloat16_hidden_states_give_float32_log_probs(inputs):
    hidden, weight, _, tokens, mask = inputs
    got, _ = token_logprobs(
        hidden.bfloat16(), weight.bfloat16(), tokens, temperature=1.0, chunk_tokens=4, mask=mask
    )
    expected, _ = dense(hidden.bfloat16(), weight.bfloat16(), tokens, 1.0)
    assert got.dtype == torch.float32
    assert (
        float((got - torch.where(mask, expected, 0.0)).abs().max()) < 0.1
    )  # the product is rounded to 8 bits
