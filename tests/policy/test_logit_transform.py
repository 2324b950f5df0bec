"""Transforms of the logits after the LM head: soft-capping and scaling, measured on the model's forward."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma4TextConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    MiniCPM3Config,
    NanoChatConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_dist.policy.lora import empty_model
from grpo_dist.policy.model import TokenLogprobs, check_supported, load_causal_lm
from grpo_dist.policy.packing import padded
from grpo_dist.runs.cold_start import response_loss
from grpo_dist.runtime.logit_transform import LogitTransform

SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CAPS = {"final_logit_softcapping": 4.0}
MODELS = {
    "gemma2": (Gemma2Config(**SHAPE, **CAPS, head_dim=16, attn_logit_softcapping=1.0), (1.0, 4.0)),
    "gemma4": (Gemma4TextConfig(**SHAPE, **CAPS, head_dim=16, hidden_size_per_layer_input=8), (1.0, 4.0)),
    "nanochat": (NanoChatConfig(**SHAPE, **CAPS), (1.0, 4.0)),
    "cohere2": (Cohere2Config(**SHAPE, logit_scale=0.25), (0.25, None)),
    "granite": (GraniteConfig(**SHAPE, logits_scaling=4.0), (0.25, None)),
    "hyperclovax": (HyperCLOVAXConfig(**SHAPE, logits_scaling=4.0), (4.0, None)),
    "minicpm3": (MiniCPM3Config(**SHAPE | {"num_key_value_heads": 2}, dim_model_base=8), (0.25, None)),
    "a key that nothing reads": (Qwen2Config(**SHAPE, logit_scale=0.25), (1.0, None)),
}  # fmt: skip


@pytest.fixture(params=list(MODELS))
def case(request, tmp_path):
    """Return a model's directory, transformers' model in float64, and its slope and cap."""
    config, expected = MODELS[request.param]
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    return str(tmp_path), exact, expected


def loaded(path):
    return load_causal_lm(path, dtype=torch.float64, attention="eager", trust_remote_code=False)


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def relative(actual, expected):
    return float((actual - expected).detach().norm() / expected.detach().norm())


def test_log_probs_entropies_candidates_and_gradients_are_those_of_transformers_logits(case):
    path, exact, (slope, cap) = case
    module = TokenLogprobs(loaded(path), temperature=0.7, chunk_mib=1)
    assert module.head._transform == LogitTransform(pytest.approx(slope), cap)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 50, (3, 9), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    layout = padded(tokens, mask)
    further = (layout.targets[:, None] + torch.tensor([0, 3, 17, 30])) % 50  # includes the token itself
    layout = replace(layout, candidates=further)
    values, entropies, candidates = module(layout, with_entropy=True)
    logps = (exact(tokens).logits / 0.7).log_softmax(-1)[:, :-1]
    expected = logps.gather(2, tokens[:, 1:, None])[..., 0]
    expected_entropies = -(logps.exp() * logps).sum(-1)
    expected_candidates = logps.flatten(0, 1).gather(1, layout.candidates)
    pairs = (
        (values[:, 1:], expected), (entropies[:, 1:], expected_entropies), (candidates, expected_candidates),
    )  # fmt: skip
    assert all(relative(a, b) < 1e-12 for a, b in pairs)
    weights = (list(m.parameters()) for m in (module.model, exact))
    mine, theirs = ([p for p in parameters if p.requires_grad] for parameters in weights)
    upstream = [torch.randn(b.shape, generator=generator, dtype=torch.float64) for _, b in pairs]
    ours = sum((a * u).sum() for (a, _), u in zip(pairs, upstream, strict=True))
    right = sum((b * u).sum() for (_, b), u in zip(pairs, upstream, strict=True))
    gradients = (torch.autograd.grad(total, leaves) for total, leaves in ((ours, mine), (right, theirs)))
    assert relative(*map(flat, gradients)) < 1e-11


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_attention_is_capped_too_which_torchs_function_leaves_out(tmp_path, attention):
    config = Gemma2Config(**SHAPE, head_dim=16, attn_logit_softcapping=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    how = {"dtype": torch.float64, "trust_remote_code": False}
    tokens = torch.arange(3, 11)[None]
    logits, expected = (
        load_causal_lm(str(tmp_path), attention=kind, **how)(tokens).logits for kind in (attention, "eager")
    )
    assert torch.equal(logits, expected)


@torch.no_grad()
def test_top_k_tokens_and_score_norms_are_those_of_transformers_logits(case):
    path, exact, _ = case
    module = TokenLogprobs(loaded(path), temperature=0.7, chunk_mib=1)
    tokens = torch.arange(3, 11)[None]
    layout = padded(tokens, torch.ones_like(tokens, dtype=torch.bool))
    logps = (exact(tokens).logits / 0.7).log_softmax(-1)[0, :-1]
    values, ids, top = module(layout, top_k=5)
    expected = logps.topk(5)
    assert torch.equal(ids.long(), expected.indices) and relative(top, expected.values) < 1e-12
    assert relative(values[0, 1:], logps.gather(1, tokens[0, 1:, None])[:, 0]) < 1e-12
    norms = module(layout, score_norms=True)[0][0, 1:]
    onehot = torch.nn.functional.one_hot(tokens[0, 1:], 50)
    assert relative(norms, (onehot - logps.exp()).square().sum(-1)) < 1e-12


def test_supervised_training_has_transformers_loss(case):
    path, exact, _ = case
    tokens = torch.arange(3, 11)[None]
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, 4:] = True
    loss = response_loss(loaded(path), tokens, mask)
    expected = exact(tokens, labels=tokens.where(mask, -100)).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # transformers only computes it in float32


def test_a_cap_and_its_derivative_by_hand():
    """2 tanh(z / 2): at z = 2 artanh(1/2) the logit is 1, and a quarter of the derivative is lost."""
    transform = LogitTransform(cap=2.0)
    z = torch.tensor([0.0, 2 * math.atanh(0.5), 1e9], dtype=torch.float64)
    logits = transform.apply_(z)
    torch.testing.assert_close(logits, torch.tensor([0.0, 1, 2], dtype=torch.float64))
    torch.testing.assert_close(transform.derivative(logits), torch.tensor([1, 0.75, 0], dtype=torch.float64))
    halved = LogitTransform(slope=0.5)
    assert halved.apply_(torch.tensor([3.0])).tolist() == [1.5] and halved.derivative(logits) == 0.5


def test_the_transform_needs_no_weights_and_leaves_the_model_as_it_was(case):
    path, exact, (slope, cap) = case
    assert LogitTransform.from_model(empty_model(path, trust_remote_code=False)).cap == cap
    tokens = torch.arange(3, 9)[None]
    before = exact(tokens).logits
    assert LogitTransform.from_model(exact).slope == pytest.approx(slope)
    assert torch.equal(exact(tokens).logits, before)


class Changed(Qwen2ForCausalLM):
    """Applies ``change`` to its logits."""

    change = staticmethod(lambda logits: logits)

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = self.change(out.logits)
        return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (torch.relu, "neither scaling nor soft-capping"),
        (lambda x: x.softmax(-1), "neither scaling nor soft-capping"),
        (lambda x: -x, "neither scaling nor soft-capping"),
        (lambda x: x + 1, "neither scaling nor soft-capping"),
        (lambda x: x.index_fill(-1, torch.tensor([7]), -1e9), "neither scaling nor soft-capping"),
        (lambda x: x[..., :40], "LM head has 50 outputs, and it returns 40 logits"),
    ],
)
def test_any_other_function_of_the_heads_outputs_is_refused(change, words):
    model = Changed(Qwen2Config(**SHAPE))
    model.change = change
    with pytest.raises(ValueError, match=rf"model some/model: .*{words}.*; use another model"):
        check_supported(model, "some/model")


def test_a_norm_in_front_of_the_head_is_refused():
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    head = model.lm_head
    model.lm_head = torch.nn.Sequential(torch.nn.LayerNorm(32), head)
    model.lm_head.weight = head.weight
    model.get_output_embeddings = lambda: head
    with pytest.raises(ValueError, match="not hidden states @ the LM head's weight"):
        LogitTransform.from_model(model)
