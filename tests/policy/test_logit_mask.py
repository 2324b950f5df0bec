"""The softmax over kept tokens: values, entropies and gradients against the definition in float64."""

import math

import pytest
import torch

from grpo_dist.policy import logprobs
from grpo_dist.policy.attention import block_spans
from grpo_dist.policy.group_logprobs import group_logprobs
from grpo_dist.policy.logit_mask import LogitMask
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.model import TokenLogprobs, load_causal_lm
from grpo_dist.runtime.logit_transform import IDENTITY, LogitTransform
from grpo_dist.types import KeptTokens
from tests.support import made_groups

CPU, V = torch.device("cpu"), 83


def mask_of(lists, vocabulary=V):
    return LogitMask.from_kept(KeptTokens.from_lists(lists, vocabulary), CPU)


def test_five_tokens_by_hand():
    """p = .4 .3 .2 .05 .05 and top_p = 0.9 keep three: q = 4/9 3/9 2/9. Token 1 has log 1/3, gradient
    -4/9 6/9 -2/9 0 0 and the entropy of q. The second row keeps all five.
    """
    logits = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05]).log().repeat(2, 1).requires_grad_()
    mask = mask_of([[0, 1, 2], [0, 1, 2, 3, 4]], 5)
    how = {"temperature": 1.0, "chunk_tokens": 1, "with_entropy": True, "mask": mask}
    values, entropies, _ = logprobs.selected_logprobs(logits, torch.eye(5), torch.tensor([1, 1]), **how)
    assert values.tolist() == pytest.approx([math.log(1 / 3), math.log(0.3)])
    q = [4 / 9, 3 / 9, 2 / 9]
    assert float(entropies.detach()[0]) == pytest.approx(-sum(p * math.log(p) for p in q))
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert gradient[0].tolist() == pytest.approx([-4 / 9, 6 / 9, -2 / 9, 0, 0])
    assert gradient[1].tolist() == pytest.approx([-0.4, 0.7, -0.2, -0.05, -0.05])


def problem(dtype):
    """Return (rows, LM head, bias), targets and kept lists; of 7 rows some keep a list, some bits, two all.
    The most likely token of a row is dropped where possible: a policy that has moved may prefer it.
    """
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 5), (V, 5), (V,))
    )
    order = (rows @ (3 * weight).T + bias).argsort(dim=1).tolist()
    sizes = [1, 2, 3, 20, V - 1, V, V]
    lists = [sorted(ids[:size]) for ids, size in zip(order, sizes, strict=True)]
    targets = torch.tensor([ids[0] for ids in order])
    leaves = [t.to(dtype).requires_grad_() for t in (rows, 3 * weight, bias)]
    return leaves, targets, lists


def dense(leaves, targets, lists, temperature, transform):
    """Return values, entropies, kept tokens and probabilities by the definition, in float64."""
    rows, weight, bias = (t.double() for t in leaves)
    logits = transform.slope * (rows @ weight.T + bias)
    if transform.cap is not None:
        logits = transform.cap * (logits / transform.cap).tanh()
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in zip(kept, lists, strict=True):
        row[ids] = True
    logp = (logits / temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
    p = logp.exp()
    entropies = -(p * logp.masked_fill(~kept, 0.0)).sum(dim=1)
    return logp.gather(1, targets[:, None])[:, 0], entropies, kept, p


@pytest.mark.parametrize("transform", [IDENTITY, LogitTransform(0.5, cap=4.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_values_entropies_and_gradients_are_those_of_the_definition(
    dtype, tolerance, chunk_tokens, transform
):
    leaves, targets, lists = problem(dtype)
    rows, weight, bias = leaves
    for temperature in (0.7, torch.linspace(0.5, 1.5, 7)):
        scale = temperature[:, None].double() if isinstance(temperature, torch.Tensor) else temperature
        how = {"temperature": temperature, "chunk_tokens": chunk_tokens, "bias": bias, "transform": transform}
        mask = mask_of(lists)
        values, entropies, _ = logprobs.selected_logprobs(
            rows, weight, targets, with_entropy=True, mask=mask, **how
        )
        *expected, kept, p = dense(leaves, targets, lists, scale, transform)
        for ours, theirs in zip((values, entropies), expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
        upstream = torch.linspace(-1, 2, 7, dtype=torch.float64)
        both = values + 0.3 * entropies, expected[0] + 0.3 * expected[1]
        for ours, theirs in (values, expected[0]), (entropies, expected[1]), both:
            pairs = zip(
                torch.autograd.grad((ours * upstream).sum(), leaves, retain_graph=True),
                torch.autograd.grad((theirs * upstream).sum(), leaves, retain_graph=True),
                strict=True,
            )
            for a, b in pairs:
                assert float((a.double() - b.double()).norm()) < 3 * tolerance * max(1.0, float(b.norm()))
        norms = logprobs.selected_score_norms(rows, weight, targets, mask=mask, **how)
        onehot = torch.nn.functional.one_hot(targets, V)
        torch.testing.assert_close(
            norms.double(), (onehot - p.detach()).square().sum(dim=1), rtol=tolerance, atol=tolerance
        )
        assert torch.equal(mask.dropped(slice(0, 7), V), ~kept)


def test_a_row_that_keeps_all_tokens_is_bit_for_bit_as_without_a_mask():
    leaves, targets, lists = problem(torch.float32)
    rows, weight, bias = leaves
    how = {"temperature": 0.7, "chunk_tokens": 3, "bias": bias, "with_entropy": True}
    masked = logprobs.selected_logprobs(rows, weight, targets, mask=mask_of(lists), **how)
    plain = logprobs.selected_logprobs(rows, weight, targets, **how)
    for a, b in zip(masked[:2], plain[:2], strict=True):
        assert torch.equal(a[5:], b[5:]) and not torch.isclose(a[:5], b[:5]).any()


def test_the_extra_tokens_of_a_head_larger_than_the_engines_are_dropped():
    (dropped,) = mask_of([range(0, 80, 2)], 80).dropped(slice(0, 1), 90)
    assert dropped.tolist() == [i % 2 == 1 or i >= 80 for i in range(90)]


def exact_logprobs(module, rows, row):
    """Return the log-probs of a row alone, from all of its logits, float64."""
    length = int(rows.lengths[row])
    ids = rows.tokens[row : row + 1, :length]
    logits = module.model(input_ids=ids, use_cache=False).logits[0].double() / 0.8
    kept = rows.kept and rows.kept[row]
    out = torch.zeros(length, dtype=torch.float64)
    for t in range(1, length):
        row_logits = logits[t - 1]
        if kept is not None and t >= length - len(kept.counts):
            mask = LogitMask.from_kept(kept, CPU).dropped(slice(0, len(kept.counts)), len(row_logits))
            row_logits = row_logits.masked_fill(mask[t - length + len(kept.counts)], -torch.inf)
        out[t] = row_logits.log_softmax(-1)[ids[0, t]]
    return out


@pytest.mark.parametrize("kernel", [None, block_spans], ids=["padded", "packed"])
def test_every_wanted_token_of_a_micro_batch_has_its_mask(tiny_model, kernel):
    """Packed with shared prompts, padded, episodes with further rows, and rows without masks."""
    how = {"dtype": torch.float32, "trust_remote_code": False}
    model = load_causal_lm(str(tiny_model), attention="auto", packing=kernel is not None, **how)
    module = TokenLogprobs(model, temperature=0.8, chunk_mib=8).eval()
    plain = load_causal_lm(str(tiny_model), attention="eager", **how)
    vocabulary = model.config.vocab_size
    groups = made_groups.truncated(made_groups.episode_groups(rewritten=0.5), vocabulary)
    batch = made_groups.batch_of(groups)
    micro = MicroBatches(10_000, kernel, 8, CPU)
    order = [4, 0, 3, len(batch) - 1]
    part = micro.part(batch, order)
    with torch.no_grad():
        together = module(micro.layout(part, part.wanted))[0].double()
        alone = TokenLogprobs(plain, temperature=0.8, chunk_mib=8).eval()
        for values, row in zip(together, order, strict=True):
            length = int(batch.lengths[row])
            mask, expected = batch.policy.mask[row][:length], exact_logprobs(alone, batch, row)
            torch.testing.assert_close(values[:length][mask], expected[mask], rtol=1e-5, atol=1e-5)
        for rows in ([], [len(batch) - 1]):  # no row, and one without masks
            bare = micro.part(batch, rows)
            assert micro.layout(bare, bare.wanted).mask is None
        # The reference has the same softmax.
        sampled = [(g.prompt, g.rollouts) for g in groups]
        (first, *_), *_ = group_logprobs(module, sampled, micro)
        mask = batch.policy.mask[0]
        columns = mask.nonzero()[:, 0]
        ours = torch.from_numpy(first.sampled[groups[0].rollouts[0].sampled]).double()
        torch.testing.assert_close(ours, exact_logprobs(alone, batch, 0)[columns], rtol=1e-5, atol=1e-5)


def test_a_slice_of_a_sequence_has_the_masks_of_its_tokens():
    """`policy.sequence_parallel`: each rank selects its indices."""
    _, _, lists = problem(torch.float32)
    mask = mask_of(lists)
    at = torch.tensor([6, 0, 3])
    whole = mask.dropped(slice(0, 7), V)
    assert torch.equal(mask.select(at).dropped(slice(0, 3), V), whole[at])
    assert torch.equal(mask.dropped(slice(2, 5), V), whole[2:5])
    assert mask.select(at[:0]).dropped(slice(0, 0), V).shape == (0, V)
