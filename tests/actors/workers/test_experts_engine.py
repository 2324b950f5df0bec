"""Mixtures of experts with a real engine and real ranks: both compute the same model, before and after an
update.
"""

import asyncio

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_dist.config import LoRAConfig
from grpo_dist.policy.loss import Objective, batch_loss
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import padded
from tests.support import made_groups
from tests.support.engines import EAGER, LIMIT, differences, trained
from tests.support.models import EXPERT_SHAPES, expert_model
from tests.support.real_ranks import ALGORITHM, TEMPERATURE, flat, gradients_of, on_all, relative, start

pytestmark = [pytest.mark.machine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("kind", "engine"), [*((kind, EAGER) for kind in sorted(EXPERT_SHAPES)), ("mixtral", {})]
)
def test_engine_and_trainer_are_the_same_model_before_and_after_updates(ray_cluster, tmp_path, kind, engine):
    gaps, moved = differences(expert_model(tmp_path, kind), trained(), engine)
    assert max(gaps) < LIMIT
    assert min(moved) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "settings"),
    [
        ("qwen3_moe", {"tie_word_embeddings": True}, {}),
        ("qwen3_moe", {"moe_intermediate_size": 40}, {}),  # the engine fills it up to 64
        ("qwen3_moe", {"mlp_only_layers": [0]}, {}),
        ("qwen2_moe", {}, {"lora": LoRAConfig(rank=4, alpha=8)}),
        ("mixtral", {}, {"lora": LoRAConfig(rank=4, alpha=8, sync="adapter")}),
    ],
)
def test_both_are_also_the_same_for_other_shapes_and_adapters(ray_cluster, tmp_path, kind, changes, settings):
    gaps, moved = differences(expert_model(tmp_path, kind, **changes), trained(**settings))
    assert max(gaps) < LIMIT
    assert min(moved) > 0.01


@pytest.mark.parametrize(
    ("kind", "stage"), [("mixtral", 3), *(pytest.param(k, 2, marks=pytest.mark.slow) for k in EXPERT_SHAPES)]
)
def test_ranks_train_experts_and_export_the_checkpoints_names(forked_ranks, tmp_path, kind, stage):
    """The gradient matches float64. The sent weights, in buckets smaller than a layer's experts, equal the
    export, under the names of the first checkpoint; transformers reads it back.
    """
    model_dir, batch = expert_model(tmp_path, kind), made_groups.batch()
    exact = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, experts_implementation="eager"
    )
    logprobs = TokenLogprobs(exact, temperature=TEMPERATURE, chunk_mib=8)(
        padded(batch.tokens, batch.policy.mask)
    )[0]
    batch_loss(logprobs, batch, Objective(ALGORITHM))[0].backward()
    expected = flat({name: p.grad for name, p in exact.named_parameters()})

    async def train():
        group = start(model_dir, ranks=2, stage=stage, micro_batch_tokens=40)
        await group.ready()
        await group.update(group.stage([batch]))
        sent = (await on_all(group, "weights"))[0]
        await group.export(tmp_path / "model", tokenizer_dir=model_dir)
        await group.shutdown()
        return sent

    (gradients, _), _ = asyncio.run(
        gradients_of(model_dir, batch, ranks=2, stage=stage, micro_batch_tokens=40)
    )
    assert relative(flat(gradients), expected) < 1e-5
    sent, first = asyncio.run(train()), load_file(model_dir / "model.safetensors")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert sent.keys() == exported.keys() == first.keys()
    assert all(torch.equal(sent[name], exported[name]) for name in sent)
    assert all(not torch.equal(sent[name], first[name]) for name in sent if ".experts." in name)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)


def test_a_sync_rebuilds_only_kernels_that_read_packed_weights():
    """A GPU's kernel stays: captured graphs hold on to it, and its weights are shuffled at every reload."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from actors.transfer.vllm_receiver import repack_experts

    model = torch.nn.ModuleDict()
    for backend in UnquantizedMoeBackend:
        method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
        torch.nn.Module.__init__(method)
        method.unquantized_backend, method.moe_kernel = backend, object()
        model[backend.name] = torch.nn.Module()
        model[backend.name].quant_method = method
    repack_experts(model)
    assert [name for name, m in model.items() if m.quant_method.moe_kernel is None] == ["CPU"]
