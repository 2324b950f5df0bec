"""Small classifiers for tests: one whose scores can be worked by hand, and random ones."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from grpo_dist.demo.tokenizer import END, character_tokenizer

# Score of the hand-made classifier at a token; 0 at others. The end of a turn is an ordinary token.
BY_HAND = {"1": 0.5, "2": -1.0, "3": 2.0, "\n": 3.0, END: 4.0}
_KINDS = {"outcome": Qwen2ForSequenceClassification, "process": Qwen2ForTokenClassification}


def config(labels: int, **changes) -> Qwen2Config:
    """Padding is EOS, as in many tokenizers: a trap for classifiers that search the end of a row."""
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
    """With one label, the logit at a token is that of BY_HAND; with two, it is the second label's, the first
    is 0.

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
