"""Mixtures of experts: exports have the checkpoint's names and shapes for any layout in transformers."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from grpo_dist.config import LoRAConfig
from grpo_dist.policy.attention import block_spans
from grpo_dist.policy.checkpoint_format import CheckpointFormat, check_expert_names, keep_used_conversions
from grpo_dist.policy.lora import (
    adapter_parameters,
    adapters,
    add_adapters,
    check_targets,
    empty_model,
    write_adapter,
)
from grpo_dist.policy.model import TokenLogprobs, attention_cost, load_causal_lm
from grpo_dist.policy.packing import packed, padded
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.tools.plan.models import from_config_json, published
from tests.support import made_groups
from tests.support.models import EXPERT_SHAPES, expert_model

KINDS = sorted(EXPERT_SHAPES)


def specs(model):
    return {name: ParameterSpec.from_tensor(name, p) for name, p in model.named_parameters()}


def load(model_dir, **how):
    settings = {"dtype": torch.float32, "attention": "auto", "trust_remote_code": False}
    return load_causal_lm(str(model_dir), **settings | how)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sync_sends_the_names_and_values_of_the_checkpoint(tmp_path, kind):
    """One tensor per expert under Mixtral's names, although the model fuses them."""
    model_dir = expert_model(tmp_path, kind)
    model, saved = load(model_dir), load_file(model_dir / "model.safetensors")
    assert any(".experts.gate_up_proj" in name for name, _ in model.named_parameters())
    form = CheckpointFormat(model, specs(model))
    sent = {}
    for name, parameter in model.named_parameters():
        tensors = form.tensors(name, parameter.data)
        assert [ParameterSpec.from_tensor(key, tensor) for key, tensor in tensors.items()] == form.specs[name]
        sent |= tensors
    assert sum(".experts." in name for name in sent) == 2 * 4 * 3
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_known_without_weights(tmp_path, kind):
    model_dir = expert_model(tmp_path, kind)
    empty, model = empty_model(model_dir, trust_remote_code=False), load(model_dir)
    assert CheckpointFormat(empty, specs(empty)).specs == CheckpointFormat(model, specs(model)).specs


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_the_checkpoint_stores_under_other_names_are_refused(tmp_path, kind):
    """Quantised checkpoints do; transformers does not write their blocks back."""
    model_dir = expert_model(tmp_path, kind)
    model = empty_model(model_dir, trust_remote_code=False)
    check_expert_names(model, model_dir)
    other = tmp_path / "other"
    other.mkdir()
    saved = load_file(model_dir / "model.safetensors")
    packed = {f"{k}_packed" if ".experts." in k else k: v for k, v in saved.items()}
    save_file(packed, other / "model.safetensors", metadata={"format": "pt"})
    words = rf"architecture {kind} is a mixture of experts .*\.experts\..*_packed\)"
    with pytest.raises(ValueError, match=words):
        check_expert_names(model, other)
    fused = {name: torch.zeros(1) for name, _ in model.named_parameters()}
    save_file(fused, other / "model.safetensors", metadata={"format": "pt"})
    check_expert_names(model, other)  # as transformers holds them


def joined_model():
    """Return a model of two matrices that its checkpoint stores as one."""
    model = nn.Module()
    model.q, model.k = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.config = None
    model._weight_conversions = [WeightConverter("qk.weight", ["q.weight", "k.weight"], [Chunk(dim=0)])]
    return model


def test_a_checkpoint_that_fuses_parameters_is_refused():
    model = joined_model()
    with pytest.raises(ValueError, match=r"joins several parameters in one tensor \(qk\.weight\)"):
        CheckpointFormat(model, specs(model))


def test_conversions_that_loading_did_not_use_are_dropped():
    """Under ZeRO-3 transformers keeps all conversions; this one would fuse tensors that are already fused."""
    model = joined_model()
    keep_used_conversions(model)
    assert set(CheckpointFormat(model, specs(model)).specs) == {"q.weight", "k.weight"}


def logprobs(model, batch, **how):
    packing, mask = how.get("packing"), batch.policy.mask
    rows = packed(batch, batch.wanted, block_spans) if packing else padded(batch.tokens, mask)
    return TokenLogprobs(model, temperature=1.0, chunk_mib=8)(rows)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_gradients_equal_float64_for_every_expert_kernel(tmp_path, kind):
    """Padded and packed rows. A checkpoint with `output_router_logits` adds no balancing loss."""
    model_dir, batch = expert_model(tmp_path, kind), made_groups.batch()

    def both(model, **how):
        values = logprobs(model, batch, **how)
        values.sum().backward()
        return values.detach().double(), torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    how = {"dtype": torch.float64, "experts_implementation": "eager"}
    expected, gradient = both(AutoModelForCausalLM.from_pretrained(model_dir, **how))
    for kernel, packing in (("eager", False), ("batched_mm", False), ("grouped_mm", True)):
        model = load(model_dir, packing=packing)
        model.set_experts_implementation(kernel)
        model.config.output_router_logits = True
        values, actual = both(model, packing=packing)
        assert (values - expected).abs().max() < 1e-5
        assert (actual - gradient).norm() / gradient.norm() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_training_has_no_dropout_and_no_noise_on_the_router(tmp_path, kind):
    """The engine has neither, whatever the model's configuration asks for."""
    noise = {"attention_dropout": 0.5, "router_jitter_noise": 0.5}
    noisy, plain = (load(expert_model(tmp_path, kind, **how)) for how in (noise, {}))
    batch = made_groups.batch()
    assert noisy.config.attention_dropout == 0.5
    with torch.no_grad():
        assert torch.equal(logprobs(noisy.train(), batch), logprobs(plain.eval(), batch))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3_moe", "k_proj, o_proj, q_proj, v_proj"),
        ("mixtral", "k_proj, o_proj, q_proj, v_proj"),
        ("qwen2_moe", "down_proj, gate_proj, k_proj, o_proj, q_proj, shared_expert_gate, up_proj, v_proj"),
    ],
)
def test_adapters_on_experts_are_refused_by_name(tmp_path, kind, names):
    """Adapters go on linear layers: attention and a shared expert. Experts are one tensor."""
    model_dir = expert_model(tmp_path, kind)
    check_targets(model_dir, LoRAConfig(), trust_remote_code=False)
    for target in ("experts", "gate"):
        with pytest.raises(ValueError, match=f"= {target}: .*: {names}"):
            check_targets(model_dir, LoRAConfig(target_modules=[target]), trust_remote_code=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["gate_proj", "up_proj", "down_proj"]])
def test_adapters_go_on_linear_layers_and_leave_experts_and_router_alone(tmp_path, kind, targets):
    """A dense layer and a shared expert have layers with the names of experts before fusing."""
    mixed = {} if kind == "mixtral" else {"mlp_only_layers": [0]}
    if kind == "mixtral" and "gate_proj" in targets:
        targets = ["k_proj"]
    model = load(expert_model(tmp_path, kind, **mixed))
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    expected = {n for n in linear if targets == "all-linear" or n.rpartition(".")[2] in targets}
    add_adapters(model, LoRAConfig(rank=4, target_modules=targets), seed=0)
    changed = adapters(adapter_parameters(model))
    assert set(changed) == {f"{name}.weight" for name in expected}
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    assert model.peft_config["default"].r == 4


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_exported_adapter(tmp_path, kind):
    model_dir, ids = expert_model(tmp_path, kind), torch.arange(11, 43)[None]
    model = load(model_dir)
    before = model(ids).logits
    add_adapters(model, LoRAConfig(rank=4), seed=0)
    for _, parameter in adapter_parameters(model):
        nn.init.normal_(parameter, std=0.1)
    write_adapter(model, dict(adapter_parameters(model)), tmp_path / "adapter", base_model=str(model_dir))
    read = PeftModel.from_pretrained(load(model_dir), tmp_path / "adapter")
    torch.testing.assert_close(read(ids).logits, model(ids).logits)
    assert not torch.allclose(before, model(ids).logits, atol=0.1)


def test_a_token_costs_the_weights_of_its_experts(tmp_path):
    """Twice the experts with the same number per token leave the cost of a token unchanged."""
    few, many = (load(expert_model(tmp_path, "qwen3_moe", num_experts=n)) for n in (4, 8))
    assert attention_cost(many) == pytest.approx(attention_cost(few), rel=0.02)


@pytest.mark.parametrize(
    ("hub_id", "parameters", "active"),
    [  # from their checkpoint index and model cards
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624, 3.3e9),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14_315_784_192, 2.7e9),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, 12.9e9),
    ],
)
def test_published_mixtures_have_their_published_sizes(hub_id, parameters, active):
    model = published(hub_id)
    assert model.parameters == parameters
    assert model.computing + model.embedding == pytest.approx(active, rel=0.02)
    assert model.read_for(1) == model.computing
    assert model.read_for(1000) == pytest.approx(model.parameters - model.embedding, rel=1e-3)


def test_a_mixture_with_dense_layers_is_counted_layer_by_layer():
    """One of two layers is dense: half of the experts, and on average half of the dense MLP."""
    shape = {"model_type": "qwen3_moe"} | EXPERT_SHAPES["qwen3_moe"]
    alike = from_config_json(shape, "m")
    mixed = from_config_json(shape | {"mlp_only_layers": [0]}, "m")
    dense, routed = 3 * 192 * 128, 4 * 128 + 2 * 3 * 96 * 128
    assert 2 * (alike.shape.layer_weights - mixed.shape.layer_weights) == routed - dense
    assert mixed.parameters == alike.parameters - 4 * 128 - 4 * 3 * 96 * 128 + dense
