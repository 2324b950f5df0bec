"""trl#7269, "GRPO: put vLLM's truncated-sampling log-probs on the trainer's support", and ms-swift#8442: the
engine samples with top-p, and its log-probs are normalised over the kept tokens; the trainer normalised over
the whole vocabulary.

trl#7269 measures it: with top_p = 0.8 the ratio of an unmoved policy is the kept share, 0.896 on average, and
half of all tokens are outside [0.9, 1.1].
"""

import pytest
import torch

from grpo_dist.policy.logit_mask import LogitMask
from grpo_dist.policy.logprobs import selected_logprobs
from grpo_dist.types import KeptTokens

TOKENS, WIDTH, VOCABULARY, TOP_P = 400, 8, 50, 0.8


@pytest.fixture(scope="module")
def sampled():
    """Return hidden states, an LM head, and an engine's top-p tokens, log-probs, kept lists and shares."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    p, order = (hidden @ weight.T).softmax(-1).sort(dim=1, descending=True)
    kept = (p.cumsum(1) - p) < TOP_P
    q = torch.where(kept, p, 0.0) / torch.where(kept, p, 0.0).sum(dim=1, keepdim=True)
    chosen = torch.multinomial(q, 1, generator=generator)
    lists = [sorted(ids[mask].tolist()) for ids, mask in zip(order, kept, strict=True)]
    shares = torch.where(kept, p, 0.0).sum(dim=1)
    return hidden, weight, order.gather(1, chosen)[:, 0], q.gather(1, chosen)[:, 0].log(), lists, shares


def trained(sampled, mask):
    hidden, weight, tokens, *_ = sampled
    return selected_logprobs(hidden, weight, tokens, temperature=1.0, chunk_tokens=64, mask=mask)[0]


def test_the_bug_takes_the_share_kept_for_a_ratio(sampled):
    *_, engine, _, shares = sampled
    ratios = (trained(sampled, None) - engine).exp()
    torch.testing.assert_close(ratios, shares, rtol=1e-4, atol=1e-5)
    assert 0.8 < ratios.mean() < 0.95
    assert ((ratios < 0.9) | (ratios > 1.1)).double().mean() > 0.4


def test_the_ratio_of_a_policy_to_itself_is_1(sampled):
    *_, engine, lists, _ = sampled
    mask = LogitMask.from_kept(KeptTokens.from_lists(lists, VOCABULARY), torch.device("cpu"))
    torch.testing.assert_close(trained(sampled, mask), engine, rtol=0, atol=2e-6)
