"""Sizes of models of any type in a plan, against transformers' own models."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from grpo_dist.config import LoRAConfig
from grpo_dist.errors import UserError
from grpo_dist.policy.lora import add_adapters
from grpo_dist.tools.plan import models
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import Sizes, activation_bytes, lora_parameters
from grpo_dist.tools.plan.models import from_config_json
from grpo_dist.tools.plan.options import Assumptions
from tests.support.fakes import config
from tests.support.kept_tensors import SHAPE, kept_by_padded_rows
from tests.support.models import EXPERT_SHAPES
from tests.support.plans import model_of

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MEASURED = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "cohere2": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gemma4_text": {"head_dim": 32, "hidden_size_per_layer_input": 16},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "glm4_moe": EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "qwen3_next": EXPERTS | {"num_experts": 4, "head_dim": 16,
                             "layer_types": ["linear_attention"] * 2 + ["full_attention"]},
}  # fmt: skip


def real_model(kind, **changes):
    with torch.device("meta"):
        settings = AutoConfig.for_model(**SHAPE | changes | {"model_type": kind})
        return AutoModelForCausalLM.from_config(settings)


@pytest.mark.parametrize("kind", list(MEASURED))
def test_models_of_other_types_are_counted_from_their_own_shapes(kind):
    """All weights, expert weights, the weights that compute a token, and adapters as peft makes them."""
    changes = {"tie_word_embeddings": False} | MEASURED[kind]
    model = from_config_json(SHAPE | changes | {"model_type": kind}, "made")
    real = real_model(kind, **changes)
    assert model.parameters == sum(p.numel() for p in real.parameters())
    routed = [p for p in real.parameters() if p.ndim == 3 and p.shape[1] != 1]  # no convolutions
    biases = [p for name, p in real.named_parameters() if "experts" in name and name.endswith("bias")]
    matrices = sum(p.numel() for p in real.parameters() if p.ndim > 1)
    matrices -= sum(m.weight.numel() for m in real.modules() if isinstance(m, torch.nn.Embedding))
    s = model.shape
    idle = sum(p.numel() for p in routed + biases) * (1 - s.experts_per_token / max(1, s.experts))
    assert model.computing == pytest.approx(matrices - idle, rel=1e-3)
    assert s.layers * s.idle_weights == pytest.approx(idle, rel=0.03)
    add_adapters(real, LoRAConfig(rank=4), seed=0)
    adapters = lora_parameters(config(policy={"lora": {"rank": 4}}).policy, model)
    assert adapters == sum(p.numel() for p in real.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype, itemsize", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_attention_without_a_kernel_keeps_what_it_computes_for_each_pair_of_tokens(kind, dtype, itemsize):
    """At twice the row length, the quadratic part equals what a real forward pass keeps."""
    shape = SHAPE | MEASURED[kind] | {"model_type": kind, "num_hidden_layers": 2}
    model = from_config_json(shape, "m")
    sizes = Sizes(False, itemsize, 0, 0, 0)

    def planned(total):
        return activation_bytes(
            model, sizes, tokens=2 * total, attended=2 * total, longest=total, checkpointing=False
        )

    real, plan = (
        [bytes_of(total) for total in (256, 512)]
        for bytes_of in (lambda total: kept_by_padded_rows(shape, dtype, total=total), planned)
    )
    assert plan[1] - 2 * plan[0] == pytest.approx(real[1] - 2 * real[0], rel=0.01)


def test_the_cache_of_a_token_is_what_its_layers_keep():
    hybrid = SHAPE | MEASURED["qwen3_next"] | {"model_type": "qwen3_next"}
    assert from_config_json(hybrid, "m").kv_values() == 2 * 2 * 16  # keys and values, heads, size: one layer
    gemma4 = {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 0}
    shape = SHAPE | gemma4 | {"model_type": "gemma4_text"}
    assert from_config_json(shape, "m").kv_values() == 2 * 2 * (5 * 16 + 32)
    latent = {
        "model_type": "deepseek_v3", "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "q_lora_rank": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    deepseek = from_config_json(SHAPE | EXPERTS | latent, "m")
    assert deepseek.kv_values() == deepseek.kv_values(4) == 3 * (24 + 8)
    assert from_config_json(SHAPE | {"model_type": "qwen2"}, "m").kv_values(4) == 2 * 3 * 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_wrapper_is_counted_as_its_text_model(tied):
    text = SHAPE | {"head_dim": 32, "model_type": "gemma3_text"}
    whole = Gemma3Config(text_config=text).to_dict()
    del whole["text_config"]["tie_word_embeddings"]  # as published: only the wrapper has the key
    model = from_config_json(whole | {"tie_word_embeddings": tied}, "made")
    real = real_model("gemma3_text", head_dim=32, tie_word_embeddings=tied)
    assert model.tied == tied and model.parameters == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", *EXPERT_SHAPES])
def test_types_that_are_known_here_are_counted_as_their_models_are(kind, tied, monkeypatch):
    """These do without transformers, which takes seconds to import."""
    c = EXPERT_SHAPES.get(kind, SHAPE) | {"model_type": kind, "max_position_embeddings": 64}
    c |= {"tie_word_embeddings": tied}
    measured = models._measure(c, "m")
    monkeypatch.setattr(models, "_measure", None)
    counted = from_config_json(c, "m")
    names = ("parameters", "tied", "linear_sides", "cached", "positions", "computing")
    assert [getattr(counted, n) for n in names] == [getattr(measured, n) for n in names]
    assert counted.shape.idle_weights == measured.shape.idle_weights
    assert counted.shape.intermediate == pytest.approx(measured.shape.intermediate, abs=1)


def test_a_row_longer_than_the_models_positions_is_not_planned(tmp_path):
    file = tmp_path / "config.json"
    yarn = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    file.write_text(json.dumps(SHAPE | {"model_type": "qwen2"} | yarn))

    def planned(tokens):
        c = config(
            model={"path": f"random:{file}"},
            data={"train": [{"path": "demo:add3"}], "max_prompt_tokens": 64},
            sampling={"max_new_tokens": tokens},
        )
        assert model_of(c).positions == 512
        return make_plan(c, "1x1xH100", Assumptions(prompt_tokens=10), splits=False)

    assert planned(448).simulated
    with pytest.raises(UserError, match=r"may be 513 tokens .*takes at most 512 positions"):
        planned(449)
