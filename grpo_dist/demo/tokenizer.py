"""A character tokenizer with a chat template: small enough to be made here, real enough to take any text."""

from __future__ import annotations

from typing import Any

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unk|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# Whole tokens, kept when text is decoded: they are part of what the reward reads.
_WORDS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def character_tokenizer() -> Any:
    """One token per printable ASCII character or newline, and per word above; anything else is unknown.

    Turns are ``<|user|>2+2=<|assistant|>4<|end|>``. Vocabulary 109, to be embedded in 128.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, END, UNKNOWN, *_ROLES]
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*specials, *_WORDS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in _WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
