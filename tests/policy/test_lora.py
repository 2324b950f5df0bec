"""Low-rank adapters on real DeepSpeed ranks: only they train, and the exported model is base + B A."""

import asyncio
from itertools import chain

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from actors.lifecycle.calls import results
from grpo_dist.config import LoRAConfig
from grpo_dist.policy.group_logprobs import group_logprobs
from grpo_dist.policy.lora import (
    Adapter,
    adapter_parameters,
    adapters,
    add_adapters,
    apply_start_adapter,
    merged_weights,
)
from grpo_dist.policy.loss import Objective
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.model import TokenLogprobs
from tests.support import made_groups
from tests.support.made_groups import shard
from tests.support.models import LORA, loaded, made_adapter
from tests.support.real_ranks import (
    ALGORITHM,
    STREAMS,
    TEMPERATURE,
    AdaptedWorker,
    flat,
    loss_of_the_whole,
    relative,
    running,
    start,
)

pytestmark = [pytest.mark.machine, pytest.mark.slow]

SETTINGS = LoRAConfig(rank=4, alpha=8)
CPU = torch.device("cpu")


def adapted(model_dir, **how):
    """Return a policy group that trains only adapters."""
    optimizer = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2}
    return start(model_dir, worker=AdaptedWorker, lora=SETTINGS, **optimizer, **how)


def on_all(group, method, *arguments):
    return together(getattr(rank, method).remote(*arguments) for rank in group.ranks)


def together(calls):
    async def answers():
        return await results(calls)

    return asyncio.run(answers())


def base_weights(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return {name: p.data for name, p in model.named_parameters()}


def expected_gradients(model_dir, tensors, batch, loss_of=None):
    """Compute the adapters' gradients in float64, in this process, without DeepSpeed. ``batch`` may have
    several streams, and temperatures per row.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    add_adapters(model, SETTINGS, seed=0)
    for name, parameter in adapter_parameters(model):
        parameter.data.copy_(tensors[name])
    module = TokenLogprobs(model, temperature=TEMPERATURE, chunk_mib=8)
    loss = loss_of_the_whole(module, batch, loss_of or Objective(ALGORITHM))
    loss.backward()
    return {name: p.grad for name, p in adapter_parameters(model)}


@pytest.mark.parametrize(("ranks", "stage", "micro_batch_tokens"), [(1, 0, 10_000), (2, 2, 40), (2, 3, 40)])
def test_only_adapters_train_and_merged_weights_are_base_plus_their_product(
    forked_ranks, tiny_model, ranks, stage, micro_batch_tokens
):
    """After one update, so that neither A's nor B's gradient is 0."""
    first, second = made_groups.batch(seed=1), made_groups.batch(seed=2)
    group = adapted(tiny_model, ranks=ranks, stage=stage, micro_batch_tokens=micro_batch_tokens)
    asyncio.run(group.ready())
    fresh = on_all(group, "adapters")[0]
    asyncio.run(group.update(group.stage([first])))
    low_rank, weights = on_all(group, "adapters")[0], on_all(group, "weights")[0]
    elements = sum(on_all(group, "optimizer_elements"))
    calls = [r.gradients.remote(s) for r, s in zip(group.ranks, shard(second, ranks), strict=True)]
    gradients, _ = together(calls)[0]
    asyncio.run(group.shutdown())

    trained = sum(t.numel() for t in low_rank.values())
    base = base_weights(tiny_model)
    assert list(weights) == list(base)
    assert trained <= elements <= trained * 1.01 + 64  # ZeRO pads its partitions
    assert trained < 0.1 * sum(w.numel() for w in base.values())
    assert all(torch.equal(t, torch.zeros_like(t)) == (".lora_B." in n) for n, t in fresh.items())

    changed = adapters(low_rank.items())
    assert len(changed) == len(low_rank) // 2 == 7 * 4  # linear layers times four blocks
    for name, weight in weights.items():
        if name in changed:
            product = changed[name].b.double() @ changed[name].a.double() * SETTINGS.scale
            assert float(product.norm()) > 0.01
            assert torch.allclose(weight.double() - base[name], product, atol=1e-6)
        else:
            assert torch.equal(weight, base[name])
    assert relative(flat(gradients), flat(expected_gradients(tiny_model, low_rank, second))) < 1e-5


@pytest.mark.parametrize(("ranks", "stage", "shared"), [(1, 0, 1), (2, 2, 2), (2, 3, 1)])
def test_a_teacher_and_demonstrations_train_adapters_as_rewards_do(
    forked_ranks, tiny_model, ranks, stage, shared
):
    """Also where two ranks share sequences."""
    batch = made_groups.mixed_batch(top_k=3)
    group = adapted(tiny_model, ranks=ranks, stage=stage, shared=shared, micro_batch_tokens=60)
    asyncio.run(group.ready())
    asyncio.run(group.update(group.stage([made_groups.batch(seed=1)])))
    low_rank = on_all(group, "adapters")[0]
    parts = [part for part in shard(batch, ranks // shared) for _ in range(shared)]
    calls = [r.gradients_with.remote(part, STREAMS) for r, part in zip(group.ranks, parts, strict=True)]
    gradients, metrics = together(calls)[0]
    asyncio.run(group.shutdown())
    assert metrics["loss/teacher"] > 0 and metrics["loss/demonstrations"] > 0
    expected = expected_gradients(tiny_model, low_rank, batch, STREAMS)
    assert relative(flat(gradients), flat(expected)) < 1e-5


@pytest.mark.parametrize(("ranks", "stage", "shared"), [(2, 3, 1), (2, 2, 2), (2, 0, 1)])
def test_the_base_gives_the_log_probs_and_top_k_tokens_of_the_model_before_its_adapters(
    forked_ranks, tiny_model, ranks, stage, shared
):
    """After an update, with groups dealt over ranks; the last rank has fewer."""
    rng = np.random.default_rng(0)
    groups = [made_groups.group(i, rng) for i in range(3)]
    requests = [(g.prompt, g.rollouts) for g in groups]
    group = adapted(tiny_model, ranks=ranks, stage=stage, shared=shared, micro_batch_tokens=60)
    asyncio.run(group.ready())
    asyncio.run(group.update(group.stage([made_groups.batch(seed=1)])))
    plain = asyncio.run(group.base_logprobs(requests))
    with_top_k = asyncio.run(group.base_logprobs(requests, 3))
    asyncio.run(group.shutdown())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    module = TokenLogprobs(model, temperature=TEMPERATURE, chunk_mib=8)
    expected = group_logprobs(module, requests, MicroBatches(999, None, 1, CPU), top_k=3)
    for taught, values, exact in zip(chain(*with_top_k), chain(*plain), chain(*expected), strict=True):
        np.testing.assert_allclose(values.sampled, exact.sampled, atol=2e-5)
        np.testing.assert_allclose(taught.sampled, exact.sampled, atol=2e-5)
        np.testing.assert_allclose(taught.top, exact.top, atol=2e-5)
        np.testing.assert_array_equal(taught.top_ids, exact.top_ids)


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_holds_the_adapters_and_resumes_exactly(forked_ranks, tiny_model, tmp_path, stage):
    """update, save, update  ==  (other processes) load, update; the export is the model and its adapter."""
    first, second = made_groups.batch(seed=1), made_groups.batch(seed=2)

    async def run(*, resumed):
        group = adapted(tiny_model, ranks=2, stage=stage)
        await group.ready()
        if resumed:
            await group.load(tmp_path / "policy")
        else:
            await group.update(group.stage([first]))
            await group.save(tmp_path / "policy")
        metrics = await group.update(group.stage([second]))
        if not resumed:
            await group.export(tmp_path / "model", tokenizer_dir=tiny_model)
        weights = await asyncio.gather(*(rank.weights.remote() for rank in group.ranks))
        await group.shutdown()
        return metrics, weights[0]

    metrics, weights = asyncio.run(run(resumed=False))
    again, same = asyncio.run(run(resumed=True))
    assert again == metrics
    assert all(torch.equal(weights[name], same[name]) for name in weights)

    base_bytes = sum(w.numel() * 4 for w in weights.values())
    saved_bytes = sum(f.stat().st_size for f in (tmp_path / "policy").rglob("*") if f.is_file())
    assert saved_bytes < 0.5 * base_bytes

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert all(torch.equal(p.data, weights[name]) for name, p in merged.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapted_model = PeftModel.from_pretrained(base, tmp_path / "model/adapter")
    with torch.no_grad():
        ids = torch.arange(11, 43)[None]
        assert torch.allclose(adapted_model(ids).logits, merged(ids).logits, atol=1e-4)
        with adapted_model.disable_adapter():
            assert not torch.allclose(adapted_model(ids).logits, merged(ids).logits, atol=1e-1)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_is_continued_and_stays_the_reference(
    forked_ranks, tiny_model, tmp_path, monkeypatch, stage
):
    """update, save  ==  (other processes) load; before and after, the reference is the start."""
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    start_model = made_adapter(tiny_model, tmp_path / "a")
    model_dir = apply_start_adapter(tiny_model, tmp_path / "a", "model.adapter = a", continued=True)
    rng = np.random.default_rng(0)
    groups = [made_groups.group(i, rng) for i in range(2)]
    requests = [(g.prompt, g.rollouts) for g in groups]

    async def run(*, resumed):
        async with running(
            model_dir, worker=AdaptedWorker, lora=LORA, ranks=2, stage=stage, lr=1e-2
        ) as group:
            (initial, *_) = await asyncio.gather(*(rank.weights.remote() for rank in group.ranks))
            if resumed:
                await group.load(tmp_path / "policy")
            else:
                await group.update(group.stage([made_groups.batch(seed=1)]))
                await group.save(tmp_path / "policy")
            reference = await group.base_logprobs(requests)
            (weights, *_) = await asyncio.gather(*(rank.weights.remote() for rank in group.ranks))
            await group.export(tmp_path / f"model-{resumed}", tokenizer_dir=model_dir)
        return initial, weights, reference

    initial, weights, reference = asyncio.run(run(resumed=False))
    initial_again, resumed, reference_again = asyncio.run(run(resumed=True))
    merged = start_model.merge_and_unload()
    for name, parameter in merged.named_parameters():
        assert torch.allclose(initial[name], parameter.data, atol=1e-6)
        assert torch.equal(weights[name], resumed[name]) and torch.equal(initial[name], initial_again[name])
    moved = [name for name in weights if not torch.equal(weights[name], initial[name])]
    assert len(moved) == 2 * 4
    module = TokenLogprobs(merged, temperature=TEMPERATURE, chunk_mib=8)
    expected = group_logprobs(module, requests, MicroBatches(999, None, 1, CPU))
    results = chain(*reference), chain(*reference_again), chain(*expected)
    for values, again, exact in zip(*results, strict=True):
        np.testing.assert_allclose(values.sampled, exact.sampled, atol=2e-5)
        np.testing.assert_array_equal(values.sampled, again.sampled)
    exported = PeftModel.from_pretrained(loaded(tiny_model), tmp_path / "model-True/adapter")
    for name, parameter in exported.merge_and_unload().named_parameters():
        assert torch.allclose(parameter.data, weights[name], atol=1e-6)


def test_merging_rounds_once_and_leaves_the_base_alone():
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    low_rank = {"w": Adapter(torch.ones(1, 3), torch.tensor([[0.01], [0.001]]))}
    merged = dict(merged_weights([("w", weight), ("v", weight)], low_rank, 2.0, torch.bfloat16))
    assert merged["w"].dtype == torch.bfloat16
    assert merged["w"].tolist() == [[1.0234375] * 3, [1.0] * 3]  # bfloat16 has steps of 2^-7 above 1
    assert merged["v"] is weight
    assert weight.tolist() == [[1.0] * 3] * 2


def test_a_checkpoint_that_lacks_an_adapted_weight_is_an_error():
    low_rank = {"model.q.weight": Adapter(torch.ones(1, 3), torch.ones(2, 1))}
    with pytest.raises(RuntimeError, match=r"no model\.q\.weight \(1 such\).*policy\.lora\.sync=merged"):
        list(merged_weights([("q.weight", torch.ones(2, 3))], low_rank, 1.0, torch.float32))
