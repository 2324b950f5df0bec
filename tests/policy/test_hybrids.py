"""Architectures whose rows cannot be packed exactly are padded: a row computes what it computes alone."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DogeConfig,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    NemotronConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from grpo_dist.policy.attention import mixing_layers, packing_problem, recurrent_layers
from grpo_dist.policy.model import TokenLogprobs, attention_cost, load_causal_lm, reads_packed_rows
from grpo_dist.policy.packing import padded
from grpo_dist.policy.sequence_parallel import check_heads
from tests.support import made_groups
from tests.support.tiers import slow_after


def hybrids():
    """Return architectures that mix tokens outside attention, or change attention logits as no kernel can."""
    shape = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 120, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    delta = {
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    mamba = {"mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_chunk_size": 8}
    return {
        "qwen3_next": Qwen3NextConfig(**shape, **delta, **experts, shared_expert_intermediate_size=32),
        "qwen3_5": Qwen3_5TextConfig(**shape, **delta),
        "bamba": BambaConfig(**shape, **mamba, attn_layer_indices=[1]),
        "falcon_h1": FalconH1Config(**shape, **mamba, mamba_d_ssm=128, lm_head_multiplier=1.0),
        "jamba": JambaConfig(
            **shape, num_experts=1, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
        ),
        "lfm2": Lfm2Config(**shape, layer_types=["conv", "full_attention"], block_multiple_of=32),
        "gemma2": Gemma2Config(**shape, head_dim=16, final_logit_softcapping=None),
        "gpt_oss": GptOssConfig(**shape, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
        "doge": DogeConfig(**shape),
        "nemotron": NemotronConfig(**shape),
    }


def test_recurrent_layers_are_distinguished_from_other_kinds_of_attention():
    kinds = {name: recurrent_layers(config) for name, config in hybrids().items()}
    attend = {"gemma2", "gpt_oss", "doge", "nemotron"}
    assert {name for name, layers in kinds.items() if not layers} == attend and kinds["lfm2"] == ["conv"]
    assert not recurrent_layers(Llama4TextConfig()) and mixing_layers(Llama4TextConfig())


@pytest.mark.parametrize("name", slow_after(list(hybrids()), 3))
def test_models_that_cannot_read_packed_rows_compute_padded_ones_as_if_alone(name, tmp_path, caplog):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(hybrids()[name]).save_pretrained(tmp_path)
    how = {"dtype": torch.float64, "attention": "auto", "trust_remote_code": False, "packing": True}
    module = TokenLogprobs(load_causal_lm(str(tmp_path), **how), temperature=0.8, chunk_mib=1)
    module.model.set_experts_implementation("eager")  # the default has no float64
    assert not reads_packed_rows(module.model) and "rows are padded instead of packed: it " in caplog.text
    words = r"sequence_parallel = 2 splits packed rows.*padded \(it (has|caps|needs).*use 1"
    with pytest.raises(ValueError, match=words):
        check_heads(module.model, 2)
    batch = made_groups.batch(groups=2, samples=3)
    masks = batch.policy.mask
    together = module(padded(batch.tokens, masks))[0]
    alone = [
        module(padded(batch.tokens[row : row + 1, :length], masks[row : row + 1, :length]))[0][0]
        for row, length in enumerate(batch.lengths.tolist())
    ]
    apart = torch.nn.utils.rnn.pad_sequence(alone, batch_first=True)
    assert far(together, apart) < 1e-6
    weights = [p for p in module.parameters() if p.requires_grad]
    gradients = (torch.autograd.grad(v.sum(), weights, allow_unused=True) for v in (together, apart))
    ours, theirs = (torch.cat([g.flatten() for g in grads if g is not None]) for grads in gradients)
    assert far(ours, theirs) < 1e-6


def far(ours, theirs):
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


def test_attention_cost_counts_the_layers_that_attend():
    model = AutoModelForCausalLM.from_config(hybrids()["qwen3_5"])  # one of two
    count = sum(p.numel() for p in model.parameters())
    assert attention_cost(model) == pytest.approx(1 * 4 * 16 / count)


def test_the_packing_check_draws_no_random_numbers():
    model = AutoModelForCausalLM.from_config(hybrids()["nemotron"])
    before = torch.get_rng_state()
    assert packing_problem(model) and torch.equal(torch.get_rng_state(), before)
