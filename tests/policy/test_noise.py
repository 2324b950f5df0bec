"""Training computes what the engine does: no dropout, no skipped layers, no noise on routers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, GPT2Config, OPTConfig, PhimoeConfig

from grpo_dist.policy.lora import empty_model
from grpo_dist.policy.model import TokenLogprobs, check_supported, load_causal_lm
from grpo_dist.policy.packing import padded
from tests.support import made_groups

SHAPE = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NOISY = {
    "opt": OPTConfig(
        **SHAPE, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64,
        dropout=0.5, attention_dropout=0.5, layerdrop=0.5,
    ),
    "falcon": FalconConfig(**SHAPE, hidden_dropout=0.5, attention_dropout=0.5),  # reads its configuration
    "bloom": BloomConfig(**SHAPE, hidden_dropout=0.5, attention_dropout=0.5),
    "gpt2": GPT2Config(**SHAPE, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", list(NOISY))
def test_a_model_in_training_computes_what_it_does_in_evaluation(name, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(NOISY[name]).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), dtype=torch.float32, attention="auto", trust_remote_code=False)
    module, batch = TokenLogprobs(model, temperature=1.0, chunk_mib=8), made_groups.batch()
    rows = padded(batch.tokens, batch.policy.mask)
    with torch.no_grad():
        assert torch.equal(module.train()(rows)[0], module.eval()(rows)[0])
    written = {key for key, value in model.config.to_dict().items() if value == 0.5}
    assert written == {key for key, value in NOISY[name].to_dict().items() if value == 0.5}


def test_a_router_that_always_draws_is_refused(tmp_path):
    shape = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
    PhimoeConfig(**shape).save_pretrained(tmp_path)
    model = empty_model(tmp_path, trust_remote_code=False)
    with pytest.raises(ValueError, match="draws experts at random while it trains"):
        check_supported(model, "phi")
