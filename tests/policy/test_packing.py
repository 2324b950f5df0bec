"""Packed rows: each row has the attention and gradient of the row alone."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from grpo_dist.batch.sharding import packed_micro_batches
from grpo_dist.batch.shared_prefixes import Prefixes, shared_prefixes
from grpo_dist.config import AlgorithmConfig
from grpo_dist.policy.attention import (
    Segments,
    VarlenSpans,
    _Repeated,
    block_spans,
    choose_kernel,
    flash_varlen,
    torch_varlen,
    varlen_spans,
)
from grpo_dist.policy.loss import Objective, batch_loss
from grpo_dist.policy.model import TokenLogprobs, attention_cost, load_causal_lm, reads_packed_rows
from grpo_dist.policy.packing import _stream_indices, packed, padded
from grpo_dist.runtime.hardware import logprob_chunk_mib, micro_batch_tokens
from grpo_dist.types import Rows
from tests.support import made_groups
from tests.support.losses import train_batch
from tests.support.made_groups import shard

CPU = torch.device("cpu")


def rows_of(prompts, completions):
    """Build rows from ``prompts`` [G] and the ``completions`` of each, as token lists."""
    flat = [(g, p, c) for g, (p, group) in enumerate(zip(prompts, completions, strict=True)) for c in group]
    width = max(len(p) + len(c) for _, p, c in flat)
    tokens = torch.zeros(len(flat), width, dtype=torch.long)
    for i, (_, p, c) in enumerate(flat):
        tokens[i, : len(p) + len(c)] = torch.tensor(p + c)
    lengths = torch.tensor([len(p) + len(c) for _, p, c in flat])
    group_ids = torch.tensor([g for g, _, _ in flat])
    return Rows(tokens, lengths, group_ids, torch.tensor([len(p) for _, p, _ in flat]), None, None, None)


def pack(rows, kernel, **how):
    """Lay ``rows`` out for the log-probs of their completions."""
    column = torch.arange(rows.tokens.shape[1])
    wanted = (column >= rows.prompt_lengths[:, None]) & (column < rows.lengths[:, None])
    return packed(rows, wanted, kernel, **how)


def test_the_worked_example():
    """The example of the module: one prompt, two completions."""
    layout = pack(rows_of([[7, 8, 9]], [[[4, 5, 2], [6, 2]]]), block_spans)
    assert layout.tokens.tolist() == [[7, 8, 9, 4, 5, 2, 6, 2]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4]]
    # 4 and 6, the first of each completion, both come from the prompt's last token.
    assert layout.sources.tolist() == [2, 3, 4, 2, 6] and layout.targets.tolist() == [4, 5, 2, 6, 2]
    rows = layout.unpack_rows(torch.arange(1.0, 6.0))
    assert rows.tolist() == [[0, 0, 0, 1, 2, 3], [0, 0, 0, 4, 5, 0]]


def test_shared_prefixes_of_prompts_are_computed_once():
    """Prompts in token order, each after the prefix it shares with the one before: 9 tokens for three
    prompts, all of an equal prompt, and all but the last token for two others.
    """
    begin, other = [7] * 9, [8] * 10
    prompts = [[*begin, 5], [*other, 1], [*begin, 2], [*begin, 5], [*other, 3]]
    rows = rows_of(prompts, [[[4], [6]], [[4]], [[5]], [[9]], [[4]]])
    layout = pack(rows, block_spans)
    assert layout.tokens.tolist() == [[*begin, 2, 5, 5, 4, 6, 9, *other, 1, 4, 3, 4]]
    assert layout.positions.tolist() == [[*range(11), 9, 10, 10, 10, *range(12), 10, 11]]
    assert layout.targets.tolist() == [4, 6, 4, 5, 9, 4]  # in the order of the rows
    assert layout.tokens[0, layout.sources].tolist() == [5, 5, 1, 2, 5, 3]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_row_finds_its_tokens_in_a_stream_no_longer_than_needed(data):
    """For prompts that share prefixes in many ways, including equal prompts and prompts that are prefixes."""
    prompt = st.lists(st.integers(1, 2), min_size=1, max_size=12).map(lambda tail: [5] * 7 + tail)
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=6))
    drawn = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3)
    rows = rows_of(prompts, [data.draw(drawn) for _ in prompts])
    indices = _stream_indices(rows.lengths.tolist(), shared_prefixes(rows))
    stream = pack(rows, block_spans).tokens[0]
    for row, length, tokens in zip(indices, rows.lengths.tolist(), rows.tokens, strict=True):
        assert torch.equal(stream[row[:length]], tokens[:length])
    alike = {tuple(p[:n]) for p in prompts for n in range(8, len(p) + 1)}  # tree nodes below the 7th token
    begun = {(p[7], i if sum(q[7] == p[7] for q in prompts) == 1 else -1) for i, p in enumerate(prompts)}
    completions = int((rows.lengths - rows.prompt_lengths).sum())
    assert stream.numel() == completions + len(alike) + 7 * len(begun)


def test_a_micro_batch_counts_shared_prefixes_once():
    """Four prompts of 10 tokens, 9 of them shared, a token each: 14 tokens; or 2 micro-batches of 12."""
    prefixes = Prefixes([0, 1, 2, 3], [10] * 4, [0, 9, 9, 9])
    assert packed_micro_batches([11] * 4, prefixes, 17) == [[0, 1, 2, 3]]
    assert packed_micro_batches([11] * 4, prefixes, 16) == [[0, 1], [2, 3]]


def heads(seed, tokens, count, size=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, count, size, generator=generator, dtype=torch.float64)


def row_by_row(q, k, v, rows, *, scale, window):
    """Compute every row alone in float64 with an explicit mask."""
    out = torch.zeros_like(q)
    for row in rows:
        length = len(row)
        back = torch.arange(length)[:, None] - torch.arange(length)
        seen = (back >= 0) & (back < (window or length))
        inputs = (t[row].transpose(0, 1)[None] for t in (q, k, v))
        here = scaled_dot_product_attention(*inputs, attn_mask=seen, scale=scale, enable_gqa=True)
        out[row] = here[0].transpose(0, 1)
    return out


# Long completions go row by row; short ones are masked within their group: two of similar length, and one.
LONG = ([[1] * 3, [2], [3] * 5], [[[4] * 5, [5], [6] * 9], [[7]], [[8] * 20, [9] * 30]])
SHORT = ([[1] * 12, [2] * 12, [3] * 40], [[[4] * 2, [5], [6] * 3], [[7], [8] * 2], [[9], [4] * 5, [5] * 2]])
# The first two prompts (groups with a mask) and the last one (rows alone) share a prefix.
BEGUN = ([[1] * 12, [1] * 10 + [2] * 3, [1] * 9], [[[4] * 2, [5]], [[7], [8] * 2], [[4] * 30, [5] * 30]])


def test_a_group_is_masked_where_it_compares_no_more_pairs_than_its_rows():
    """A prompt of 6 and four samples of 3: 18 x 18 = 4 x 9 x 9 pairs; of 4: 22 x 22 > 4 x 10 x 10. GPUs have
    no kernel for a mask with fewer key heads.
    """
    rows = rows_of([[1] * 6, [1] * 6], [[[4] * 3] * 4, [[4] * 4] * 4])
    blocks = pack(rows, block_spans).spans.blocks
    shapes = [(block.rows, block.longest, block.mask is None) for block in blocks]
    assert shapes == [(4, 10, True), (1, 18, False)]
    shared = [np.r_[0:6, 6 + 3 * i : 9 + 3 * i] for i in range(4)]
    for device, masked in ((CPU, True), (torch.device("meta"), False)):
        (block,) = block_spans(shared, [0] * 4, 18, device).blocks
        assert (block.mask is not None) is masked


def varlen_stand_in(q, k, v, queries_of, keys_of, scale, left, dropout):
    """Specify a variable-length kernel: masks are aligned to the ends of rows."""
    assert dropout == 0.0 and len(queries_of.ends) == len(keys_of.ends)
    for segments, tokens in ((queries_of, q), (keys_of, k)):
        lengths = segments.ends.diff()
        assert segments.ends.dtype == torch.int32 and segments.longest == int(lengths.max())
        assert int(lengths.min()) > 0 and int(segments.ends[-1]) == len(tokens)
    out = torch.zeros_like(q)
    bounds = (zip(s.ends[:-1].tolist(), s.ends[1:].tolist(), strict=True) for s in (queries_of, keys_of))
    for (begin, end), (first, last) in zip(*bounds, strict=True):
        keys, values = (t[first:last] for t in (k, v))
        queries = torch.zeros(last - first, *q.shape[1:], dtype=q.dtype)
        queries[begin - end :] = q[begin:end]
        row = np.arange(last - first)
        window = None if left < 0 else left + 1
        out[begin:end] = row_by_row(queries, keys, values, [row], scale=scale, window=window)[begin - end :]
    return out


VARLEN = partial(varlen_spans, varlen_stand_in)


def test_variable_length_kernels_get_shared_tokens_as_keys_only():
    """A prompt of 3, completions of 3 and 2, three padding tokens, which see each other. Equal rows: once."""
    spans = pack(rows_of([[7, 8, 9]], [[[4, 5, 2], [6, 2]]]), VARLEN, multiple=11).spans
    assert spans.queries.ends.tolist() == [0, 6, 8, 11] and spans.queries.longest == 6
    assert spans.keys.ends.tolist() == [0, 6, 11, 14] and spans.keys.longest == 6
    assert spans.indices.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 8, 9, 10]
    rows = [np.arange(5), np.arange(5)]
    spans = VARLEN(rows, [0, 0], 5, CPU)
    assert spans.queries.ends.tolist() == spans.keys.ends.tolist() == [0, 5] and spans.indices is None
    leaves = [heads(i, 5, n) for i, n in enumerate((4, 2, 2))]
    ours = spans.attend(*leaves, scale=0.3, window=None, dropout=0.0)
    torch.testing.assert_close(ours, row_by_row(*leaves, rows, scale=0.3, window=None))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    ("kernel", "kv_heads"), [(block_spans, 1), (block_spans, 2), (block_spans, 4), (VARLEN, 2)]
)
@pytest.mark.parametrize(
    ("lists", "masks"), [(LONG, 0), (SHORT, 2), (BEGUN, 1)], ids=["long", "short", "begun"]
)
def test_attention_is_that_of_each_row_alone_with_its_gradient(window, kernel, kv_heads, lists, masks):
    packs = rows_of(*lists)
    layout = pack(packs, kernel, multiple=7)
    if kernel is block_spans:
        assert sum(block.mask is not None for block in layout.spans.blocks) == masks
    size = layout.tokens.shape[1]
    indices = _stream_indices(packs.lengths.tolist(), shared_prefixes(packs))
    rows = [row[:length] for row, length in zip(indices, packs.lengths.tolist(), strict=True)]
    leaves = [heads(i, size, n).requires_grad_() for i, n in enumerate((4, kv_heads, kv_heads))]
    ours = layout.spans.attend(*leaves, scale=0.3, window=window, dropout=0.0)
    expected = row_by_row(*leaves, rows, scale=0.3, window=window)
    read = np.unique(np.concatenate(rows))  # tokens that no row reads have no output
    torch.testing.assert_close(ours[read], expected[read])
    upstream = heads(9, size, 4)[read]
    for a, b in zip(*(torch.autograd.grad(o[read], leaves, upstream) for o in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_temperature_that_is_not_positive_is_refused_where_rows_are_laid_out():
    rows = replace(rows_of([[1] * 3], [[[4], [5]]]), temperatures=torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"temperature = 0\.0: expected temperatures above 0"):
        pack(rows, block_spans)


def test_gradients_of_shared_tokens_are_added_up_in_float32():
    """301 uses of a token, each with a gradient of 1: a bfloat16 sum would stop at 256, and earlier drop
    terms below 2^-9 of it.
    """
    leaf = torch.zeros(3, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    indices = torch.cat([torch.zeros(301, dtype=torch.long), torch.tensor([1, 1, 2])])
    repeated = _Repeated.apply(leaf, indices)
    (gradient,) = torch.autograd.grad(repeated, leaf, torch.ones_like(repeated))
    assert gradient[:, 0, 0].tolist() == [300.0, 2.0, 1.0]  # 300 is 301 in bfloat16


@pytest.mark.parametrize(
    ("completions", "multiple", "window"),
    [
        ([[[4] * 5, [5], [6] * 9], [[7]]], 1, 4),
        ([[[4] * 5], [[7] * 3]], 1, 4),  # without shared prompts the stream goes to the kernel unchanged
        ([[[4] * 3, [5] * 3], [[7]]], 7, None),  # padded by as many tokens as the prompt has
    ],
)
def test_variable_length_kernels_get_each_row_whole(completions, multiple, window):
    rows = rows_of([[1] * 3, [2]], completions)
    by_blocks, by_kernel = (pack(rows, k, multiple=multiple) for k in (block_spans, VARLEN))
    assert (by_kernel.spans.indices is None) == (max(map(len, completions)) == 1)
    leaves = [heads(i, by_blocks.tokens.shape[1], n) for i, n in enumerate((4, 2, 2))]
    how = {"scale": 0.3, "window": window, "dropout": 0.0}
    used = 11 if multiple > 1 else by_blocks.tokens.shape[1]
    ours, theirs = (layout.spans.attend(*leaves, **how)[:used] for layout in (by_kernel, by_blocks))
    torch.testing.assert_close(ours, theirs)


def test_kernels_agree_on_rows_of_episodes_that_may_share_the_prompt():
    """Some further rows of an episode begin with the prompt, others do not."""
    batch = made_groups.episode_batch(groups=2, rewritten=0.6)
    assert (batch.prompt_lengths == 0).any() and len(set(batch.prompt_lengths.tolist())) == 3
    by_blocks, by_kernel = (packed(batch, batch.wanted, k) for k in (block_spans, VARLEN))
    leaves = [heads(i, by_blocks.tokens.shape[1], n) for i, n in enumerate((4, 2, 2))]
    how = {"scale": 0.3, "window": None, "dropout": 0.0}
    ours = by_blocks.spans.attend(*leaves, **how)
    torch.testing.assert_close(by_kernel.spans.attend(*leaves, **how), ours)
    # Row by row, each with all of its earlier tokens.
    indices = _stream_indices(batch.lengths.tolist(), shared_prefixes(batch))
    rows = [row[:length] for row, length in zip(indices, batch.lengths.tolist(), strict=True)]
    for row, tokens in zip(rows, batch.tokens, strict=True):
        assert torch.equal(by_blocks.tokens[0, row], tokens[: len(row)])
    torch.testing.assert_close(ours, row_by_row(*leaves, rows, scale=0.3, window=None))


def test_the_kernel_for_packed_rows_depends_on_device_dtype_and_setting():
    cuda = torch.device("cuda")
    assert choose_kernel("auto", CPU, torch.float32) is block_spans
    assert choose_kernel("auto", cuda, torch.float32) is block_spans
    assert choose_kernel("sdpa", cuda, torch.bfloat16) is block_spans
    assert choose_kernel("auto", cuda, torch.bfloat16).args[0] is torch_varlen
    assert choose_kernel("flash_attention_2", cuda, torch.bfloat16).args[0] is flash_varlen
    with pytest.raises(ValueError, match=r"model\.attention = flash_attention_2 on cpu"):
        choose_kernel("flash_attention_2", CPU, torch.float32)
    with pytest.raises(ValueError, match=r"eager reads no packed rows.*model\.packing=false"):
        choose_kernel("eager", CPU, torch.float32)


def test_torchs_kernel_is_called_by_its_signature(monkeypatch):
    """Up to the device call: the operator itself needs a GPU."""
    import torch.nn.attention.varlen as varlen

    passed = {}

    def operator(q, k, v, ends, ends_k, longest, longest_k, causal, scale, window, gqa, *rest):
        passed.update(causal=causal, scale=scale, window=window, gqa=gqa, rest=rest)
        assert (ends, longest, ends_k, longest_k) == (queries.ends, 3, keys.ends, 4)
        return q, None, None

    monkeypatch.setattr(varlen.torch.ops.torch_attn, "_varlen_attn", operator, raising=False)
    q, k = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    queries, keys = Segments.from_lengths([2, 3], CPU), Segments.from_lengths([2, 4], CPU)
    spans = VarlenSpans(torch_varlen, queries, keys, torch.tensor([0, 1, 0, 2, 3, 4]))
    assert spans.attend(q, k, k, scale=0.5, window=None, dropout=0.0) is q
    assert (passed["causal"], passed["window"], passed["gqa"], passed["scale"]) == (True, [-1, 0], True, 0.5)
    spans.attend(q, q, q, scale=0.5, window=2, dropout=0.0)
    assert (passed["causal"], passed["window"], passed["gqa"]) == (False, [1, 0], False)
    with pytest.raises(ValueError, match="attention_dropout"):
        spans.attend(q, q, q, scale=0.5, window=None, dropout=0.1)


def architectures():
    from transformers import LlamaConfig, MistralConfig, Olmo2Config, Phi3Config, Qwen2Config, Qwen3Config

    shape = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 120, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    return {
        "qwen2": Qwen2Config(**shape, tie_word_embeddings=True),
        "qwen2 with a window": Qwen2Config(
            **shape, use_sliding_window=True, sliding_window=4, max_window_layers=1
        ),
        "qwen3": Qwen3Config(**shape, head_dim=32),
        "llama": LlamaConfig(**shape),
        "mistral": MistralConfig(**shape, sliding_window=5),
        "olmo2": Olmo2Config(**shape),
        "phi3": Phi3Config(**shape),
    }


def saved(config, directory):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def loaded(path, packing):
    how = {"dtype": torch.float64, "attention": "auto", "trust_remote_code": False}
    model = load_causal_lm(path, packing=packing, **how)
    return TokenLogprobs(model, temperature=0.8, chunk_mib=1)


@pytest.mark.parametrize("name", list(architectures()))
def test_log_probs_and_gradients_are_those_of_padded_rows(name, tmp_path):
    """Prompts of 6 to 11 tokens; the last three begin with the same 8."""
    path = saved(architectures()[name], tmp_path)
    batch = made_groups.batch(groups=6, samples=4)
    alike = batch.tokens[:, :8]
    alike[batch.group_ids >= 3] = alike[-1].clone()
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(batch.tokens.shape, dtype=torch.float64, generator=generator)
    results = []
    for layout in (padded(batch.tokens, batch.policy.mask), packed(batch, batch.wanted, block_spans)):
        module = loaded(path, packing=layout.spans is not None)
        logprobs, entropies, _ = module(layout, with_entropy=True)
        ((logprobs + 0.3 * entropies) * upstream).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
        results.append((logprobs.detach(), entropies.detach(), gradient))
    # The prompt of each group is computed once instead of four times, the shared prefix once.
    assert layout.tokens.numel() == int(batch.lengths.sum()) - 3 * sum(6 + i for i in range(6)) - 2 * 8
    for apart, together in zip(*results, strict=True):
        # transformers norms are float32 for any dtype of the model.
        assert float((together - apart).norm() / apart.norm()) < 1e-6


@pytest.mark.slow
def test_sources_have_their_losses_in_packed_rows(tmp_path):
    path = saved(architectures()["qwen2"], tmp_path)
    batch = made_groups.batch(groups=6, samples=4)
    stream = replace(
        batch.policy, old_logprobs=batch.policy.rollout_logprobs, loss_ids=batch.group_ids % 3,
        kl_weights=(batch.group_ids % 3).double(), ref_logprobs=batch.policy.rollout_logprobs - 0.1,
    )  # fmt: skip
    batch = replace(batch, policy=stream)
    kl = {"coef": 0.1}
    apart = [AlgorithmConfig(loss=loss, kl=kl) for loss in ("gspo", {"clip_high": 0.5})]
    objective = Objective(AlgorithmConfig(kl=kl), of_sources=apart)
    results = []
    for packing in (False, True):
        module = loaded(path, packing)
        plan = packed_micro_batches(batch.lengths.tolist(), shared_prefixes(batch), 100)
        for rows in plan:
            part = batch.select(rows)
            how = packed(part, part.wanted, block_spans) if packing else padded(part.tokens, part.wanted)
            batch_loss(module(how)[0], part, objective)[0].backward()
        results.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert len(plan) > 2 and float((results[1] - results[0]).norm() / results[0].norm()) < 1e-6


def test_a_model_prepared_for_packed_rows_refuses_others(tmp_path):
    model = loaded(saved(architectures()["llama"], tmp_path), packing=True)
    assert reads_packed_rows(model.model)
    with pytest.raises(ValueError, match=r"does not get the boundaries of packed rows.*model\.packing=false"):
        model(padded(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)))


def test_attention_cost_of_a_token_before_another(tmp_path):
    """2 layers of 4 heads of 16 over the parameters; FLOPs by hand: 4 H D a pair against 2 a parameter."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(architectures()["qwen2"])
    count = sum(p.numel() for p in model.parameters())
    assert attention_cost(model) == pytest.approx(2 * 4 * 16 / count)


def test_micro_batches_of_the_worked_example():
    shared, apart = (Prefixes.of_prompts([0, 0, 1, 1], [size] * 4) for size in (3, 0))
    assert packed_micro_batches([5, 6, 4, 8], shared, 12) == [[0, 1], [2, 3]]
    assert packed_micro_batches([5, 6, 4, 8], apart, 12) == [[0, 1], [2, 3]]
    assert packed_micro_batches([5, 6, 4, 8], shared, 17) == [[0, 1, 2, 3]]
    assert packed_micro_batches([50, 6], Prefixes.of_prompts([0, 1], [3, 3]), 12) == [[0], [1]]
    assert packed_micro_batches([], Prefixes.of_prompts([], []), 12) == []


def test_a_shared_prompt_counts_in_the_copies_of_attention():
    """Nine rows of a prompt of 99 and one token are 108 tokens, and 900 in attention's copies."""
    rows = [100] * 9, Prefixes.of_prompts([0] * 9, [99] * 9)
    assert packed_micro_batches(*rows, 225) == [list(range(9))]
    assert [len(part) for part in packed_micro_batches(*rows, 200)] == [5, 4]


LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=40)


def described(drawn):
    groups = [g for g, _ in drawn]
    prompts = [2 + g for g in groups]
    return [p + c for p, (_, c) in zip(prompts, drawn, strict=True)], groups, prompts


@given(LENGTHS, st.integers(1, 120))
def test_packed_micro_batches_hold_every_row_once_within_the_budget(drawn, budget):
    lengths, groups, prompts = described(drawn)
    parts = packed_micro_batches(lengths, Prefixes.of_prompts(groups, prompts), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        stream = sum(lengths[r] - prompts[r] for r in part) + sum(2 + g for g in {groups[r] for r in part})
        assert stream <= budget or len(part) == 1
        assert sum(lengths[r] for r in part) <= 4 * budget or len(part) == 1
    # At most as many micro-batches as rows.
    assert len(parts) <= max(1, len(lengths))


@settings(max_examples=50)
@given(LENGTHS, st.integers(1, 5), st.sampled_from([0.0, 0.01]))
def test_the_busiest_rank_is_no_busier_than_with_single_rows_assigned(drawn, ranks, square):
    lengths, groups, prompts = described(sorted(drawn))
    batch = _of_lengths(lengths, groups, prompts)
    parts = shard(batch, ranks, square=square)
    assert sorted(int(t) for part in parts for t in part.tokens[:, 0]) == list(range(len(lengths)))

    def load(rows):
        shared = sum(2 + g for r in rows for g in [groups[r]]) - sum(2 + g for g in {groups[r] for r in rows})
        return sum(lengths[r] + square * lengths[r] ** 2 for r in rows) - shared

    dealt = [[] for _ in range(ranks)]
    for row in sorted(range(len(lengths)), key=lambda r: (-(lengths[r] + square * lengths[r] ** 2), r)):
        loads = [sum(lengths[r] + square * lengths[r] ** 2 for r in rows) for rows in dealt]
        dealt[min(range(ranks), key=lambda i: (loads[i], len(dealt[i]), i))].append(row)
    ours = [[int(t) for t in part.tokens[:, 0]] for part in parts]
    assert max(map(load, ours)) <= max(map(load, dealt)) + 1e-9


def _of_lengths(lengths, groups, prompts):
    tokens = torch.arange(len(lengths))[:, None].expand(-1, max(lengths)).clone()
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    batch = train_batch(mask, tokens=tokens, lengths=torch.tensor(lengths))
    return replace(batch, group_ids=torch.tensor(groups), prompt_lengths=torch.tensor(prompts))


def test_groups_stay_together_if_loads_allow():
    groups = [0] * 8 + [1] * 8
    batch = _of_lengths([20] * 16, groups, [10] * 16)
    assert [set(part.group_ids.tolist()) for part in shard(batch, 2)] == [{0}, {1}]
    # One long row outweighs the prompts: it is alone.
    batch = _of_lengths([20, 300, 20, 20], [0, 0, 1, 1], [10] * 4)
    assert sorted(map(len, shard(batch, 2))) == [1, 3]


def test_default_sizes_follow_from_the_device():
    assert (micro_batch_tokens(None, "cpu"), micro_batch_tokens(None, "cuda")) == (4096, 16384)
    assert logprob_chunk_mib("cpu", 0) == 32
