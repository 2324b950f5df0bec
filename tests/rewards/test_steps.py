"""Where steps end, in characters and in tokens of real tokenizers."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from grpo_dist.demo.tokenizer import END, character_tokenizer
from grpo_dist.rewards.group import decoded_length, split_steps, token_ends

BLANK = "\n\n"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("one\n\ntwo", [("one", 5), ("two", 8)]),
        ("one\n\ntwo\n\n\n\nthree", [("one", 5), ("two", 12), ("three", 17)]),
        ("\n\none \n\n two", [("one", 8), ("two", 12)]), ("one\n\n", [("one", 5)]),
        ("one\n\n\ntwo", [("one", 5), ("two", 9)]), ("one\ntwo", [("one\ntwo", 7)]), ("", [("", 0)]),
        (" \n\n ", [("", 4)]),
    ],
)  # fmt: skip
def test_steps_cover_the_text(text, steps):
    assert split_steps(text, BLANK) == steps


def test_token_ends_by_hand():
    """ "on", "e\\n\\n", "two", "\\n", "\\nth", "ree", EOS decode to 2, 5, 8, 9, 12, 15, 15 characters."""
    lengths = [0, 2, 5, 8, 9, 12, 15, 15]
    text = "one\n\ntwo\n\nthree"
    ends = token_ends([end for _, end in split_steps(text, BLANK)], 7, lengths.__getitem__)
    assert ends.dtype == np.int32 and ends.tolist() == [1, 4, 6]


def test_two_steps_within_one_token_share_it():
    assert token_ends([5, 10, 15], 3, [0, 3, 12, 15].__getitem__).tolist() == [1, 1, 2]


def test_a_single_step_ends_with_the_completion():
    assert token_ends([4], 6, lambda n: n).tolist() == [5]


TEXTS = [
    "2+2\n\nis 4\n\n\\boxed{4}",
    "é\n\nnaïve ∑\n\n\n\n答案是 5\n\n🙂🙂\n\n<think>x</think>",
    "\n\nlead\n\ntrail\n\n",
    "12345 678\n\n90",
]


def llama_tokenizer():
    """Build a tokenizer like Llama 2's: words begin with a space, which the first loses, and a character that
    is not in the vocabulary is its bytes.
    """
    letters = sorted({c for text in TEXTS for c in text if c.isascii() and c != " "} | {"▁"})
    pieces = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁i", "▁is"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "i"), ("▁i", "s")]
    fast = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END)


@pytest.fixture(scope="module", params=["characters", "words", "pieces"])
def tokenizer(request):
    if request.param == "characters":
        return character_tokenizer()
    if request.param == "pieces":
        return llama_tokenizer()
    plain, learner = Qwen2Tokenizer().backend_tokenizer, Tokenizer(models.BPE())
    learner.pre_tokenizer, learner.normalizer = plain.pre_tokenizer, plain.normalizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    learner.train_from_iterator([text * 3 for text in TEXTS] + ["x\n\n" * 20, "4\n\n" * 20], trainer)
    learned = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(learned["vocab"], [tuple(pair) for pair in learned["merges"]], eos_token=END)


@pytest.mark.parametrize("text", TEXTS)
def test_every_step_ends_at_the_token_of_its_last_character(tokenizer, text):
    """Compares all prefixes: the first n tokens hold the characters of the step, the first n - 1 do not."""
    ids = np.array([*tokenizer(text)["input_ids"], tokenizer.convert_tokens_to_ids(END)], np.int32)
    decode = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert tokenizer.decode(ids.tolist(), **decode) == text
    steps = split_steps(text, BLANK)
    ends = token_ends([end for _, end in steps], len(ids), decoded_length(tokenizer, ids)).tolist()
    assert ends[-1] == len(ids) - 1
    for (_, char_end), token in zip(steps[:-1], ends, strict=False):
        assert tokenizer.decode(ids[: token + 1].tolist(), **decode).startswith(text[:char_end])
        assert not tokenizer.decode(ids[:token].tolist(), **decode).startswith(text[:char_end])


def test_word_pieces_that_contain_the_separator(tokenizer):
    """The ends depend on how each tokenizer splits the text."""
    ids = np.array(tokenizer("x\n\nx\n\nx")["input_ids"], np.int32)
    ends = token_ends([3, 6, 7], len(ids), decoded_length(tokenizer, ids)).tolist()
    pieces = [tokenizer.decode([i]) for i in ids.tolist()]
    assert ["".join(pieces[: end + 1]) for end in ends] == ["x\n\n", "x\n\nx\n\n", "x\n\nx\n\nx"]


class Decoding:
    """A tokenizer that records the longest list of tokens that it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.longest = tokenizer, 0

    def decode(self, ids, **options):
        self.longest = max(self.longest, len(ids))
        return self._tokenizer.decode(ids, **options)


def test_a_long_text_is_decoded_in_windows_that_count_as_the_whole(tokenizer, monkeypatch):
    """Windows begin within characters, at spaces, and after more special tokens than a window has."""
    monkeypatch.setattr("grpo_dist.rewards.group._WINDOW", 8)
    decode = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    texts = tokenizer("é∑ 答案 🙂🙂 is 1 2 is\n\n" * 4)["input_ids"]
    separated = [*texts, *[tokenizer.convert_tokens_to_ids(END)] * 30, *texts]
    for ids, longest in ((texts, 16), (separated, len(separated))):
        whole = [len(tokenizer.decode(ids[:n], **decode).rstrip("\ufffd")) for n in range(len(ids) + 1)]
        decoding = Decoding(tokenizer)
        length = decoded_length(decoding, np.array(ids, np.int32))
        assert [length(n) for n in reversed(range(len(ids) + 1))][::-1] == whole
        assert decoding.longest <= longest and len(ids) > 4 * 16
