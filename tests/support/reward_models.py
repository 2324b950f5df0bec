"""Small reward models: classifiers, and process models in their published forms."""

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
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from grpo_dist.config import RewardsConfig
from grpo_dist.demo.tokenizer import END, character_tokenizer

# Small classifiers for tests: one whose scores can be worked by hand, and random ones.

# Score of the hand-made classifier at a token; 0 at others. The end of a turn is an ordinary token.
BY_HAND = {"1": 0.5, "2": -1.0, "3": 2.0, "\n": 3.0, END: 4.0}
_KINDS = {"outcome": Qwen2ForSequenceClassification, "classifier": Qwen2ForTokenClassification}


def config(labels: int, **changes) -> Qwen2Config:
    """Return a configuration with EOS as padding, as in many tokenizers: a trap for finding a row's end."""
    end = character_tokenizer().convert_tokens_to_ids(END)
    return Qwen2Config(
        **{
            "vocab_size": 272, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "num_labels": labels, "pad_token_id": end, "eos_token_id": end, "bos_token_id": None,
            "dtype": "float32", "rms_norm_eps": 1e-12,
        }
        | changes
    )  # fmt: skip


def by_hand(directory: Path, kind: str, *, labels: int = 1, template: bool = True) -> str:
    """Write a model whose logit at a token is its value in BY_HAND; with two labels the first logit is 0.

    The layer adds nothing; token k of BY_HAND is the unit vector k, whose RMS over 8 is 1 / sqrt(8).
    """
    tokenizer = _tokenizer(template)
    model = _KINDS[kind](config(labels))
    vectors = torch.eye(8)
    with torch.no_grad():
        for projection in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[0].get_submodule(projection).weight.zero_()
        model.model.embed_tokens.weight[:] = vectors[7]
        weights = torch.zeros(8)
        for k, (token, value) in enumerate(BY_HAND.items()):
            model.model.embed_tokens.weight[tokenizer(token)["input_ids"][0]] = vectors[k]
            weights[k] = value / 8**0.5
        model.score.weight.zero_()
        model.score.weight[-1] = weights
        if model.score.bias is not None:
            model.score.bias.zero_()
    return _save(model, tokenizer, directory)


def random(directory: Path, kind: str, *, labels: int = 1) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = _KINDS[kind](config(labels, num_hidden_layers=2, max_position_embeddings=256))
        with torch.no_grad():
            model.score.weight.normal_()
    return _save(model, _tokenizer(True), directory)


def _tokenizer(template: bool):
    tokenizer = character_tokenizer()
    if not template:
        tokenizer.chat_template = None
    return tokenizer


def _save(model, tokenizer, directory: Path) -> str:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def model_settings(path, kind="outcome", **settings):
    """Return the settings of one model of `rewards.models`."""
    entry = {"name": "m", "path": str(path), "kind": kind, **settings}
    return RewardsConfig.model_validate({"models": [entry]}).models[0]


# Small random process reward models with the architectures, heads and weight names of published ones.

_SIZES = {
    "vocab_size": 272, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "dtype": "float32",
}  # fmt: skip


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """Like the code shipped with Qwen2.5-Math-PRM: a two-layer head on every token."""

    def __init__(self, settings) -> None:
        super().__init__(settings)
        size = settings.hidden_size
        self.model = Qwen2Model(settings)
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))
        self.post_init()

    def forward(self, input_ids):
        return self.score(self.model(input_ids=input_ids).last_hidden_state)


def marked_tokenizer():
    """Return the character tokenizer, with the step marks that published models have as single tokens."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_0>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("ки", special=False, normalized=False)])
    return tokenizer


def made_qwen_prm(directory: Path) -> Qwen2ForProcessRewardModel:
    model = _random(lambda: Qwen2ForProcessRewardModel(config(2, num_hidden_layers=2, **_LONG)))
    return _save_marked(model, directory)


def made_math_shepherd(directory: Path, **changes) -> MistralForCausalLM:
    settings = MistralConfig(**_SIZES | {"sliding_window": None} | changes)
    return _save_marked(_random(lambda: MistralForCausalLM(settings)), directory)


def made_capped_shepherd(directory: Path) -> Gemma2ForCausalLM:
    """Like `made_math_shepherd`, for a model that caps its logits and the attention's."""
    caps = {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5}
    settings = Gemma2Config(**_SIZES, **caps, head_dim=4, attn_implementation="eager")
    return _save_marked(_random(lambda: Gemma2ForCausalLM(settings)), directory)


def made_rlhflow(directory: Path) -> LlamaForCausalLM:
    settings = LlamaConfig(**_SIZES, tie_word_embeddings=True)
    return _save_marked(_random(lambda: LlamaForCausalLM(settings)), directory)


def made_skywork_prm(directory: Path) -> tuple[Qwen2ForCausalLM, nn.Linear]:
    """Write a causal model whose file also has the value head of TRL's wrapper."""
    model = _random(lambda: Qwen2ForCausalLM(config(1, num_hidden_layers=2, **_LONG)))
    head = _random(lambda: nn.Linear(8, 1))
    _save_marked(model, directory)
    file = directory / "model.safetensors"
    extra = {f"v_head.summary.{name}": value.contiguous() for name, value in head.state_dict().items()}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    return model, head


_LONG = {"max_position_embeddings": 256}


def _random(make):
    """Make a model with weights large enough that scores of different steps differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.5)
    return model.eval()


def _save_marked(model, directory: Path):
    model.save_pretrained(directory)
    marked_tokenizer().save_pretrained(directory)
    return model


MADE = {
    "qwen": made_qwen_prm,
    "skywork": made_skywork_prm,
    "math_shepherd": made_math_shepherd,
    "rlhflow": made_rlhflow,
}
