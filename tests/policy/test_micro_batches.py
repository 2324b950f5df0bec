"""Micro-batches of a rank: log-probs of all rows are copied to the host once per update."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.config.algorithm import EntropyConfig
from grpo_dist.policy import trainer
from grpo_dist.policy.attention import NAME, block_spans, register, varlen_spans
from grpo_dist.policy.loss import batch_loss, divergence_from_teacher
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.preparation import EntropyBonus
from grpo_dist.policy.trainer import Trainer
from tests.support import made_groups
from tests.support.kept_tensors import varlen_that_keeps
from tests.support.losses import objective
from tests.support.tiers import slow_after


def test_log_probs_of_all_micro_batches_come_to_the_host_in_one_transfer(monkeypatch):
    batch = made_groups.batch(groups=2, samples=3, reference=False)
    plan = [[4, 1], [0], [], [5, 2, 3]]
    logprobs = torch.randn(len(batch.lengths), batch.tokens.shape[1])
    rank = rank_of(plan, batch, logprobs)
    transfers, to_host = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: transfers.append(t) or to_host(t))
    monkeypatch.setattr(trainer, "reduce_over_ranks", lambda stats: stats)
    metrics = Trainer.accumulate(rank, batch, keep_logprobs=True)
    micro = MicroBatches(1000, None, 1, torch.device("cpu"))
    assert metrics[COMPUTED_TOKENS] == sum(micro.part(batch, rows).tokens.numel() for rows in plan)
    assert len(transfers) == 1
    kept = rank.token_logprobs
    assert sorted(kept) == sorted(batch.row_ids.tolist())
    for row, row_id in enumerate(batch.row_ids.tolist()):
        expected = logprobs[row][batch.policy.mask[row]]
        assert kept[row_id].dtype == "float32" and torch.equal(torch.from_numpy(kept[row_id]), expected)
    logprobs.copy_(logprobs + 1)
    before = {row: values.copy() for row, values in kept.items()}
    Trainer.accumulate(rank, batch, keep_logprobs=True)  # a later epoch: the first log-probs stay
    assert all((rank.token_logprobs[row] == before[row]).all() for row in before)
    Trainer.accumulate(rank_of(plan, batch, logprobs), batch)
    assert len(transfers) == 2  # not copied unless requested


def rank_of(plan, batch, logprobs):
    """Return a rank without a model, whose rows have ``logprobs`` [B, T]."""
    micro, parts = MicroBatches(1000, None, 1, torch.device("cpu")), []
    index = {row_id: row for row, row_id in enumerate(batch.row_ids.tolist())}

    def part_of(batch, rows):
        parts.append(micro.part(batch, rows))
        return parts[-1]

    def engine(layout, with_entropy):
        part = parts[-1]
        values = torch.zeros(part.tokens.shape)
        for i, row_id in enumerate(part.row_ids.tolist()):
            if row_id in index:
                values[i] = logprobs[index[row_id], : values.shape[1]]
        return values, torch.zeros_like(values), None

    engine.set_gradient_accumulation_boundary = engine.backward = lambda _: None
    planned = SimpleNamespace(
        plan=lambda _: plan, part=part_of, layout=micro.layout, move_to_device=micro.move_to_device
    )
    return SimpleNamespace(
        _micro=planned, engine=engine, rank=SimpleNamespace(world_size=1), _objective=objective(),
        _bonus=EntropyBonus(EntropyConfig()), _reports=True, token_logprobs={},
    )  # fmt: skip


SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 120,
}  # fmt: skip


@pytest.mark.parametrize("temperatures", [False, True], ids=["one temperature", "temperatures"])
@pytest.mark.parametrize(
    "kernel", [block_spans, partial(varlen_spans, varlen_that_keeps)], ids=["blocks", "varlen"]
)
@pytest.mark.parametrize(
    "settings",
    slow_after(
        [
            {"kl": {"coef": 0.1}, "entropy": {"coef": 0.1}},
            {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
            {"correction": {"kind": "tis", "veto": 1e-4}, "off_policy_mask_threshold": 0.1},
            {"kl": {"coef": 0.1}, "distillation": {"coef": 1.0}, "demonstration_coef": 0.1},
        ],
        4,
    ),
    ids=["clip", "gspo", "correction", "streams"],
)
def test_no_micro_batch_waits_for_the_device(kernel, settings, temperatures):
    """Tensors on the device `meta` have no values: code that reads one would wait for a GPU."""
    meta = torch.device("meta")
    register()
    config = Qwen2Config(**SHAPE, attn_implementation=NAME)
    with meta:
        model = TokenLogprobs(Qwen2ForCausalLM(config), temperature=1.0, chunk_mib=1)
    micro = MicroBatches(1000, kernel, 1, meta)
    batch = made_groups.mixed_batch(top_k=3) if "distillation" in settings else made_groups.batch(groups=2)
    each = torch.linspace(0.5, 1.5, len(batch), dtype=torch.float64)
    batch = replace(batch, temperatures=each if temperatures else None)
    part = micro.part(batch, [4, 1, 0])
    layout = micro.layout(part, part.wanted, part.teacher)
    logprobs, entropy, candidates = model(layout, with_entropy=True)
    how, on_device = objective(**settings), micro.move_to_device(part)
    taught = divergence_from_teacher(candidates, layout, how.distillation)
    loss, stats = batch_loss(logprobs, on_device, how, entropy=entropy, from_teacher=taught)
    loss.backward()
    assert logprobs.shape == part.tokens.shape and all(value.is_meta for value in stats.values())
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
