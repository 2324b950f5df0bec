"""Texts have the same ids in a batch as alone."""

import json
import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_dist.chat import batches
from grpo_dist.chat.batches import BatchEncoder, cuts_at_spaces, cuts_out_digits
from grpo_dist.chat.template import encode_all
from grpo_dist.demo.tokenizer import character_tokenizer

WORDS = [
    "the", "x^2", "don't", "12345", "7", "été", "e\u0301", "數學", "\U0001f600", "<|end|>", "a\nb",
    "\\pi", "!", "/x", "3.14x20", "1\u0301", "\u06621",
]  # fmt: skip
SPACES = [" "] * 8 + ["  ", "\n", " \n", "\n ", "\t", "\u00a0", "\u180e ", " \u2003", "\x1c "]


def texts(count):
    rng = random.Random(0)
    samples = ["", " ", "  the", "the ", " the", "\n", " x^2\n "]
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randrange(1, 12))
        samples.append("".join(word + rng.choice([*SPACES, ""]) for word in words))
    return samples


def tokenizer(pre_tokenizer, normalizer=None, **end):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(texts(300), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **end)


def split(pattern):
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


def read_as_bytes(pattern):
    steps = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.Split(Regex(pattern), "isolated"),
    ]
    return pre_tokenizers.Sequence(steps)


byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUT = {
    "gpt2": (byte_level, None),
    "smollm2": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]), None),
    **{f"pattern {i}": (split(pattern), normalizers.NFC()) for i, pattern in enumerate(batches._PATTERNS)},
}
WHOLE = {
    "prefix": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    "metaspace": (pre_tokenizers.Metaspace(), None),
    "pattern of bytes": (read_as_bytes(batches._PATTERNS[0]), None),
    "unknown pattern": (split(r"\S+ \S+|\s+"), None),
    "normalised": (byte_level, normalizers.Strip()),
}


def encoded(encoder, batch):
    ids, ends = encoder.encode(batch)
    return [ids[begin:end].tolist() for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_each_text_has_the_ids_that_it_has_alone(name, monkeypatch):
    monkeypatch.setattr("grpo_dist.chat.batches._REMEMBERED", 40)  # words are evicted meanwhile
    monkeypatch.setattr("grpo_dist.chat.batches._FEW", 1)
    monkeypatch.setattr("grpo_dist.chat.batches._AT_ONCE", 150)
    loaded = tokenizer(*(CUT | WHOLE)[name])
    assert cuts_at_spaces(json.loads(loaded.backend_tokenizer.to_str())) == (name in CUT)
    encoder = BatchEncoder(loaded)
    for batch in (texts(400), ["the x^2", "x^2 the 12345"], texts(50)):
        assert encoded(encoder, batch) == encode_all(batch, loaded)
    assert encoded(encoder, ["", ""]) == [[], []] and len(encoder.encode([])[1]) == 0


def test_a_token_that_takes_the_space_before_it_is_not_cut_off():
    loaded = tokenizer(byte_level)
    settings = json.loads(loaded.backend_tokenizer.to_str())
    for change in ({"lstrip": True}, {"rstrip": True}, {"content": "<a b>"}, {"content": "<\n>"}):
        changed = settings | {"added_tokens": [settings["added_tokens"][0] | change]}
        assert not cuts_at_spaces(changed)
    assert cuts_at_spaces(settings)


def test_digits_are_cut_out_where_the_tokenizer_has_each_alone():
    settings = {name: json.loads(tokenizer(*CUT[name]).backend_tokenizer.to_str()) for name in CUT}
    names = {name for name in CUT if cuts_out_digits(settings[name])}
    assert names == {"smollm2", "pattern 1", "pattern 2"}
    for token in (AddedToken("<extra_1>"), AddedToken("extra", single_word=True)):
        loaded = tokenizer(*CUT["smollm2"])
        loaded.add_tokens([token])
        assert not cuts_out_digits(json.loads(loaded.backend_tokenizer.to_str()))


def test_a_tokenizer_with_code_of_its_own_is_called_itself():
    class Shouting(PreTrainedTokenizerFast):
        def __call__(self, text, **arguments):
            return super().__call__([word.upper() for word in text], **arguments)

    loaded = Shouting(tokenizer_object=tokenizer(byte_level).backend_tokenizer)
    assert encoded(BatchEncoder(loaded), ["the"]) == encode_all(["the"], loaded)
    demo = character_tokenizer()
    assert encoded(BatchEncoder(demo), ["1+1"]) == encode_all(["1+1"], demo)
