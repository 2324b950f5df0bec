"""Unusable teachers are refused before anything starts, from model files without weights."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import PhimoeConfig, Qwen2Config

from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.runs import prepare_teachers
from grpo_dist.runs.models import load_tokenizer
from grpo_dist.runs.prepare_teachers import load_teachers
from tests.support import fakes

LIMIT = 64  # maximum sequence length of every model here


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, and teachers with another vocabulary, fewer or more embeddings, and random routing."""
    root, tokenizer = tmp_path_factory.mktemp("models"), character_tokenizer(ascii_only=True)
    foreign = character_tokenizer(ascii_only=True)
    foreign.add_tokens(["seven"])
    rows = len(tokenizer)
    for name, model_tokenizer, embeddings in (
        ("policy", tokenizer, rows), ("foreign", foreign, rows + 1), ("fewer", tokenizer, rows - 1),
        ("more", tokenizer, rows + 8), ("noisy", tokenizer, rows),
    ):  # fmt: skip
        kind = PhimoeConfig if name == "noisy" else Qwen2Config
        shape = kind(
            vocab_size=embeddings, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=LIMIT,
        )  # fmt: skip
        shape.save_pretrained(root / name)
        model_tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def load(models, monkeypatch):
    """Return a function that loads ``teachers`` of two sources of problems, "even" and "odd"."""
    tokenizer = load_tokenizer(models / "policy", False)
    monkeypatch.setattr(prepare_teachers, "resolve_model", lambda model, *_, **__: models / model.path)

    def load(*teachers, reward_coef=1.0, top_k=0, lengths=(10, 20)):
        configs = [{"name": f"t{i}", "model": "policy"} | teacher for i, teacher in enumerate(teachers)]
        section = {"teachers": configs, "reward_coef": reward_coef}
        section |= {"kl": {"name": "top_k", "k": top_k}} if top_k else {}
        train = [{"path": "demo:add3", "name": source} for source in ("even", "odd")]
        config = fakes.config(distillation=section, data={"train": train}, sampling={"max_new_tokens": 8})
        prompts = [
            replace(
                prompt, source=("even", "odd")[i % 2], token_ids=np.full(lengths[i % 2], 50, np.int32),
                text=f"{i} + 1", columns={"hint": f"<{i}>"},
            )
            for i, prompt in enumerate(fakes.prompts(4))
        ]  # fmt: skip
        return load_teachers(config, prompts, (models / "policy", tokenizer), print)

    return load


@pytest.mark.parametrize(
    ("teachers", "words"),
    [
        (
            [{"model": "foreign"}],
            ["teachers t0", "another tokenizer", "1 tokens differ", "'seven'", "missing here"],
        ),
        ([{"model": "fewer"}], ["teachers t0", "106 token embeddings", "policy 107", "at least as many"]),
        ([{"model": "noisy"}], ["teachers t0", "draws experts at random"]),
        ([{"model": "sft"}], ["teachers t0", "use reference"]),
        ([{"sources": ["even", "prime"]}], ["teachers t0", "`sources` has prime", "expected even, odd"]),
        ([{"prompt": "{problem} {solution}"}], ["{solution}", "no such column", "answer, hint, problem"]),
        (
            [{"prompt": "x" * 60}],
            ["teachers t0", "and 8 of a completion", "takes at most 64 positions", "shorten its `prompt`"],
        ),
        ([{}, {"model": "fewer"}, {"model": "foreign"}], ["teachers t1", "teachers t2"]),
    ],
)
def test_a_teacher_that_cannot_be_used_is_named_with_what_to_do(load, teachers, words):
    with pytest.raises(ValueError) as refusal:
        load(*teachers)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_teacher_may_have_more_embeddings_and_the_reference_needs_no_directory(load, models):
    _, directories = load({"model": "more"}, {"model": "reference"})
    assert directories == {"t0": models / "more"}


def test_no_more_likeliest_tokens_than_the_policy_has_are_asked_for(load):
    load({"model": "more"}, top_k=107)
    with pytest.raises(ValueError, match=r"distillation\.kl\.k = 108, but the policy has 107 tokens; use at"):
        load({"model": "more"}, top_k=108)


@pytest.mark.parametrize("teacher", [{}, {"model": "reference"}])
def test_a_teacher_must_reach_its_longest_prompt_and_completion_and_nothing_longer(load, teacher):
    load(teacher, lengths=(10, LIMIT - 8))
    with pytest.raises(
        ValueError, match=rf"{LIMIT - 7} tokens of a prompt and 8 .* data\.max_prompt_tokens, or"
    ):
        load(teacher, lengths=(10, LIMIT - 7))
    load(teacher | {"sources": ["even"]}, lengths=(10, LIMIT))


def test_a_short_prompt_of_its_own_replaces_a_long_one(load):
    load({"prompt": "1"}, lengths=(LIMIT, LIMIT))


def test_only_taught_problems_have_a_prompt_of_the_teacher(load, models):
    """In the policy's format, with problem, answer and columns filled in."""
    prompts, _ = load({"sources": ["odd"], "prompt": "{problem}={answer}{hint}{}"})
    tokenizer = load_tokenizer(models / "policy", False)
    read = [{name: tokenizer.decode(ids) for name, ids in p.teacher_ids.items()} for p in prompts]
    assert read == [
        {},
        {"t0": "<|user|>1 + 1=1<1>{}<|assistant|>"},
        {},
        {"t0": "<|user|>3 + 1=3<3>{}<|assistant|>"},
    ]


def test_a_source_without_a_teacher_needs_a_weight_of_rewards(load):
    even = {"sources": ["even"]}
    load(even)
    load(even, {"sources": ["odd"]}, reward_coef=0.0)
    load(even, even, {}, reward_coef=0.0)
    with pytest.raises(ValueError, match="source odd has no teacher"):
        load(even, even, reward_coef=0.0)
