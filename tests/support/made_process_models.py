"""Small random process reward models with the architectures, heads and weight names of published ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from grpo_dist.demo.tokenizer import character_tokenizer
from tests.support.made_classifiers import config

_SIZES = {
    "vocab_size": 272, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "dtype": "float32",
}  # fmt: skip


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """As the code that ships with Qwen2.5-Math-PRM: a two-layer head on every token."""

    def __init__(self, settings) -> None:
        super().__init__(settings)
        size = settings.hidden_size
        self.model = Qwen2Model(settings)
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))
        self.post_init()

    def forward(self, input_ids):
        return self.score(self.model(input_ids=input_ids).last_hidden_state)


def marked_tokenizer():
    """The characters, with the marks that published models have as single tokens."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_0>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("ки", special=False, normalized=False)])
    return tokenizer


def made_qwen_prm(directory: Path) -> Qwen2ForProcessRewardModel:
    model = _random(lambda: Qwen2ForProcessRewardModel(config(2, num_hidden_layers=2, **_LONG)))
    return _saved(model, directory)


def made_math_shepherd(directory: Path, **changes) -> MistralForCausalLM:
    settings = MistralConfig(**_SIZES | {"sliding_window": None} | changes)
    return _saved(_random(lambda: MistralForCausalLM(settings)), directory)


def made_capped_shepherd(directory: Path) -> Gemma2ForCausalLM:
    """As `made_math_shepherd`, of a model that caps its logits, and those of attention."""
    caps = {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5}
    settings = Gemma2Config(**_SIZES, **caps, head_dim=4, attn_implementation="eager")
    return _saved(_random(lambda: Gemma2ForCausalLM(settings)), directory)


def made_rlhflow(directory: Path) -> LlamaForCausalLM:
    settings = LlamaConfig(**_SIZES, tie_word_embeddings=True)
    return _saved(_random(lambda: LlamaForCausalLM(settings)), directory)


def made_skywork_prm(directory: Path) -> tuple[Qwen2ForCausalLM, nn.Linear]:
    """A causal model whose file also has the value head of TRL's wrapper."""
    model = _random(lambda: Qwen2ForCausalLM(config(1, num_hidden_layers=2, **_LONG)))
    head = _random(lambda: nn.Linear(8, 1))
    _saved(model, directory)
    file = directory / "model.safetensors"
    extra = {f"v_head.summary.{name}": value.contiguous() for name, value in head.state_dict().items()}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    return model, head


_LONG = {"max_position_embeddings": 256}


def _random(make):
    """Weights large enough that scores of different steps differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.5)
    return model.eval()


def _saved(model, directory: Path):
    model.save_pretrained(directory)
    marked_tokenizer().save_pretrained(directory)
    return model


MADE = {
    "qwen": made_qwen_prm,
    "skywork": made_skywork_prm,
    "math_shepherd": made_math_shepherd,
    "rlhflow": made_rlhflow,
}
