"""Generated problems, tokenizers and models."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.config.files import load_config
from grpo_dist.data.made_problems import demonstration, demonstrations, problems
from grpo_dist.data.prompts import PromptFormat
from grpo_dist.data.readers import read
from grpo_dist.demo.model import cached_model, random_model

STEP = re.compile(r"(\d)\+(\d)\+(\d)=(\d+)")


def wrong_steps(a: int, b: int, text: str) -> tuple[int, int]:
    """Return the number of wrong steps of a demonstration and its answer; checks all other digits."""
    match = re.fullmatch(r"<think>(.*)</think>\\boxed\{(\d+)\}", text)
    assert match
    wrong_count, carry, digits = 0, 0, []
    for place, step in enumerate(match[1].split(",")):
        x, y, c, total = map(int, STEP.fullmatch(step).groups())
        assert (x, y, c) == (a // 10**place % 10, b // 10**place % 10, carry)
        wrong_count += total != x + y + c
        digits.append(total % 10)
        carry = total // 10
    assert int(match[2]) == carry * 1000 + sum(d * 10**i for i, d in enumerate(digits))
    return wrong_count, int(match[2])


# Addition


def test_a_demonstration_is_the_worked_sum():
    expected = r"<think>4+4+0=8,6+9+0=15,9+4+1=14</think>\boxed{1458}"
    assert demonstration(964, 494, random.Random(0), noise=0.0) == expected


def test_noise_is_the_share_of_demonstrations_with_one_wrong_step_that_propagates():
    rng, spoiled = random.Random(1), 0
    for _ in range(2000):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        wrong_count, answer = wrong_steps(a, b, demonstration(a, b, rng, noise=0.5))
        assert wrong_count in (0, 1)
        assert (answer == a + b) == (wrong_count == 0)
        spoiled += wrong_count
    assert spoiled / 2000 == pytest.approx(0.5, abs=0.04)  # 3.6 standard errors


@pytest.mark.parametrize(
    ("name", "pattern", "sizes"),
    [
        ("add2", r"(\d\d)\+(\d\d)=", (360, 7000)),
        ("add3", r"(\d{3})\+(\d{3})=", (1000, 8000)),
        ("add4", r"(\d{4})\+(\d{4})=", (1000, 8000)),
        ("products", r"(\d{3})\*(\d\d)=", (1000, 8000)),
    ],
)
def test_no_problem_of_the_test_split_is_ever_trained_or_demonstrated(name, pattern, sizes):
    test = {p["problem"] for p in problems(name, "test")}
    train = {p["problem"] for p in problems(name, "train")}
    demonstrated = {d["prompt"] for d in demonstrations(name, 20_000, noise=0.5, seed=3)}
    assert (len(test), len(train)) == sizes
    assert not test & train and not test & demonstrated
    for problem in problems(name, "test"):
        a, b = map(int, re.fullmatch(pattern, problem["problem"]).groups())
        assert int(problem["answer"]) == (a * b if name == "products" else a + b)


@pytest.mark.parametrize("name", ["add3", "products"])
def test_demonstrations_are_a_function_of_the_seed(name):
    first = demonstrations(name, 50, noise=0.5, seed=0)
    assert first == demonstrations(name, 50, noise=0.5, seed=0)
    assert first != demonstrations(name, 50, noise=0.5, seed=1)
    assert demonstrations(name, 20, noise=0.5, seed=0) == first[:20]


# Sums after worked examples


@pytest.mark.parametrize(("name", "digits", "sizes"), [("sums2", 2, (7000, 360)), ("sums3", 3, (8000, 1000))])
def test_sums_after_examples_have_one_split_for_a_problem_and_its_swap(name, digits, sizes):
    def read(problem):
        *examples, question = problem.splitlines()
        for example in examples:
            a, b, total = map(int, re.fullmatch(r"(\d+) \+ (\d+) = (\d+)", example).groups())
            assert a + b == total
        return examples, tuple(
            map(int, re.fullmatch(rf"(\d{{{digits}}}) \+ (\d{{{digits}}}) =", question).groups())
        )

    splits = []
    for split in ("train", "test"):
        rows = problems(name, split)
        questions = [read(row["problem"]) for row in rows]
        assert [int(row["answer"]) for row in rows] == [a + b for _, (a, b) in questions]
        splits.append({frozenset(pair) for _, pair in questions})
        assert len({pair for _, pair in questions}) == len(rows)
        (examples,) = {tuple(shown) for shown, _ in questions}
    assert (len(problems(name, "train")), len(problems(name, "test"))) == sizes
    assert not splits[0] & splits[1]
    shown = [frozenset(map(int, example.split(" = ")[0].split(" + "))) for example in examples]
    assert len(shown) == 3 and not splits[1] & set(shown)


def test_the_toy_of_r1_zero_shows_no_sum_that_is_worked_without_tags():
    data = load_config("configs/r1_zero_smollm2.yaml").data
    prompts = [
        PromptFormat.from_config(data).text(row.problem, tokenizer=None)
        for source in (*data.train, *data.eval)
        for row in read(source)
    ]
    visible_texts = {re.sub(r"<think>.*</answer>", "", text) for text in prompts}
    assert len(visible_texts) == 7000 + 128 and all("41 + 7 =" in text for text in visible_texts)
    assert not [text for text in visible_texts if re.search(r"= *\d", text)]


# Products


def test_a_product_is_a_call_whose_result_is_given_or_a_guess_in_the_share_of_noise():
    rows = demonstrations("products", 4000, noise=0.7, seed=1)
    guesses = [row for row in rows if isinstance(row["completion"], str)]
    assert len(guesses) / 4000 == pytest.approx(0.7, abs=0.026)  # 3.6 standard errors
    correct = 0
    for row in rows:
        question = row["prompt"].removesuffix("=")
        a, b = map(int, question.split("*"))
        assert 10_000 <= a * b < 100_000
        if isinstance(row["completion"], str):
            guess = re.fullmatch(r"\\boxed\{(\d+)\}", row["completion"])[1]
            assert (len(guess), guess[0], guess[-1]) == (len(str(a * b)), str(a * b)[0], str(a * b)[-1])
            correct += int(guess) == a * b
        else:
            assert row["completion"] == [
                {"text": f"```calculator\n{question}\n```\n"},
                {"text": f"```output\n{a * b}\n```\n", "given": True},
                {"text": f"\\boxed{{{a * b}}}"},
            ]
    assert correct / len(guesses) < 0.01


def test_unknown_names_and_splits_are_refused_with_the_known_ones():
    for call, message in (
        (lambda: problems("sub3", "train"), "demo:sub3: no such data set; expected demo:add3 or demo:prod"),
        (lambda: problems("add3", "dev"), "no split `dev`; expected train or test"),
        (lambda: cached_model("huge", seed=0), "demo:huge: no such model; expected one of demo:tiny"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


# Tokenizer and model


@pytest.mark.parametrize(
    "text",
    [
        "964+494=",
        "<think>4+4+0=8</think>\\boxed{8}",
        "  two  spaces\n\n\ttab ",
        "日本 é 😀",
        "<|user|>x<|end|>",
    ],
)
def test_the_saved_tokenizer_round_trips_any_text(tiny_model, text):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < AutoModelForCausalLM.from_pretrained(tiny_model).config.vocab_size


def test_every_character_and_mark_is_one_token(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len(tokenizer("964 + 494")["input_ids"]) == 9
    assert len(tokenizer("<think>1</think>\\boxed{1}")["input_ids"]) == 6
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>s<|user|>u<|assistant|>a<|end|><|assistant|>"
    assert len(tokenizer(text)["input_ids"]) == 8
    ids = tokenizer("4<|end|><|pad|>")["input_ids"]
    assert ids[1:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "4"


def test_a_model_is_a_function_of_name_and_seed(tmp_path, monkeypatch):
    weights = []
    for directory, seed in (("a", 0), ("b", 0), ("c", 1)):
        monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / directory))
        torch.manual_seed(random.randrange(100))
        weights.append(load_file(cached_model("tiny", seed=seed) / "model.safetensors"))
    first, second, other = weights
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not all(torch.equal(first[k], other[k]) for k in first)


@pytest.mark.parametrize(
    "shape", [{"model_type": "qwen2", "vocab_size": "300"}, {"model_type": "qwen2", "vocab_size": None},
              {"model_type": "nope", "vocab_size": 300},
              {"model_type": "qwen2", "vocab_size": 300, "hidden_size": "64"},
              {"model_type": "qwen2", "vocab_size": 300, "num_attention_heads": 0},
              {"model_type": "qwen2", "vocab_size": 300, "hidden_act": "nope"}],
)  # fmt: skip
def test_a_shape_that_makes_no_model_is_refused_by_key_and_file(tmp_path, monkeypatch, shape):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    with pytest.raises(ValueError) as refusal:
        random_model(file, seed=0)
    assert str(refusal.value).startswith(f"model.path = random:{file}: ") and len(str(refusal.value)) < 500


@pytest.mark.parametrize("split", ["train", "test"])
def test_plain_sums_are_the_sums_after_examples_without_the_examples(split):
    """The same problems have the same split, so no test problem of one is a training problem of the other."""
    plain, after_examples = problems("plain_sums2", split), problems("sums2", split)
    assert all(re.fullmatch(r"\d\d \+ \d\d =", row["problem"]) for row in plain)
    assert plain == [{**row, "problem": row["problem"].splitlines()[-1]} for row in after_examples]


@pytest.mark.slow
def test_building_a_model_keeps_the_random_state_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    cached_model("tiny", seed=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["tiny", "small", "micro"])
def test_attention_heads_have_a_size_that_engines_support(name):
    """vLLM's CPU attention supports 32, 64, 80, 96, 112, 128 and larger, and crashes with others."""
    config = json.loads((cached_model(name, seed=0) / "config.json").read_text())
    assert config["hidden_size"] / config["num_attention_heads"] in (32, 64, 80, 96, 112, 128)
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
