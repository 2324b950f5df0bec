"""The reference as a real Ray actor: its log-probs, and how a refresh mixes in the policy."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.weight_sync import ReferenceSync
from actors.workers.reference import ReferencePool, ReferenceWorker
from grpo_dist.config import ModelConfig, ReferenceConfig, WeightSyncConfig
from grpo_dist.policy.lora import base_weights
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import padded
from grpo_dist.types import Prompt, Rollout
from tests.support.patience import HANG_S
from tests.support.real_engine import ACTORS, one_rank

pytestmark = [pytest.mark.machine, pytest.mark.slow]

PROMPT = Prompt("p", np.array([11, 12, 13], np.int32), "1", "made")
ROLLOUTS = tuple(
    Rollout("p", i, np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", "", np.zeros(len(ids)))
    for i, ids in enumerate(([20, 21, 22, 1], [30, 1], [40]))
)


@torch.no_grad()
def expected(model):
    module = TokenLogprobs(model, temperature=0.7, chunk_mib=8)
    values = []
    for rollout in ROLLOUTS:
        ids = torch.tensor(np.concatenate([PROMPT.token_ids, rollout.completion_ids]).astype(np.int64))[None]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, 3:] = True
        values.append(module(padded(ids, mask))[0][0, 3:].numpy())
    return values


def close(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all(np.abs(a.sampled - getattr(b, "sampled", b)).max() < 1e-5 for a, b in pairs)


@pytest.fixture(scope="module")
def start(ray_cluster, tiny_model):
    def start():
        return ReferencePool(
            ReferenceConfig(), ACTORS, model=ModelConfig(path="tiny"),
            model_dir=str(tiny_model), temperature=0.7, token_budget=16,
        )  # fmt: skip

    return start


@pytest.mark.slow
def test_a_refresh_mixes_in_the_policy_and_checkpoints_restore_it(start, tiny_model, tmp_path):
    async def session():
        policy = one_rank(ModelConfig(path="tiny"), tiny_model, temperature=0.7)
        pool = start()
        await asyncio.gather(policy.ready(), pool.ready())
        frozen = await pool.logprobs(PROMPT, ROLLOUTS)
        moved = await policy.ranks[0].move.remote(3)
        settings = WeightSyncConfig(bucket_mb=1, backend="gloo")
        sync = await ReferenceSync.connect(policy, pool, settings, mix=0.25, timeout_s=HANG_S)
        await sync.refresh()
        mixed = await pool.logprobs(PROMPT, ROLLOUTS)
        await pool.save(tmp_path / "reference.safetensors")
        await sync.refresh()
        twice = await pool.logprobs(PROMPT, ROLLOUTS)
        await pool.shutdown()
        await policy.shutdown()
        again = start()
        await again.ready()
        await again.load(tmp_path / "reference.safetensors")
        restored = await again.logprobs(PROMPT, ROLLOUTS)
        await again.shutdown()
        return frozen, moved, mixed, twice, restored

    frozen, moved, mixed, twice, restored = asyncio.run(session())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert close(frozen, expected(model))
    for share, values in ((0.25, mixed), (1 - 0.75**2, twice)):
        for name, parameter in model.named_parameters():
            parameter.data = first[name].lerp(moved[name], share)
        model.tie_weights()
        assert close(values, expected(model)) and not close(values, frozen)
    assert all(np.array_equal(a.sampled, b.sampled) for a, b in zip(mixed, restored, strict=True))


def test_a_rollback_to_before_the_first_refresh_drops_the_moving_average(tiny_model, tmp_path, monkeypatch):
    """Without Ray. The same refresh gives the same weights as the first time."""
    model = ModelConfig(path="tiny", dtype="bfloat16")
    worker = ReferenceWorker(model=model, model_dir=str(tiny_model), temperature=0.7, token_budget=16)
    worker.ready()
    worker._transport = object()
    moved = [(name, weight + 1.0) for name, weight in base_weights(worker._module.model)]
    monkeypatch.setattr("actors.workers.reference.receive", lambda *_: [moved])
    worker.save(tmp_path / "before")
    worker.mix_in((), 1, 0.001)
    worker.save(tmp_path / "refreshed")
    worker.load(tmp_path / "before")
    worker.mix_in((), 1, 0.001)
    worker.save(tmp_path / "again")
    refreshed, again = (load_file(tmp_path / name) for name in ("refreshed", "again"))
    assert {weight.dtype for weight in refreshed.values()} == {torch.float32}
    assert all(torch.equal(weight, again[name]) for name, weight in refreshed.items())


def test_likeliest_tokens_are_tokens_of_the_policy_also_where_the_teacher_has_more(tiny_model):
    """Without Ray. Log-probs refer to the teacher's whole distribution."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    for vocabulary in (None, 50):
        options = {"model": ModelConfig(path="tiny"), "model_dir": str(tiny_model), "temperature": 0.7}
        worker = ReferenceWorker(**options, token_budget=16, vocabulary=vocabulary)
        worker.ready()
        results = worker.logprobs(PROMPT, (ROLLOUTS, None), 4)
        for rollout, result in zip(ROLLOUTS, results, strict=True):
            ids = torch.tensor([[*PROMPT.token_ids.tolist(), *rollout.completion_ids.tolist()]])
            with torch.no_grad():
                logp = (model(ids).logits[0, 2:-1] / 0.7).log_softmax(-1)
            best = logp[:, :vocabulary].topk(4)
            np.testing.assert_array_equal(result.top_ids, best.indices)
            np.testing.assert_allclose(result.top, best.values, atol=1e-5)
    assert logp.topk(4).indices.max() >= 50, "the limit of the vocabulary has no effect here"
