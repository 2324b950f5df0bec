"""The cold start: its training data, its reproducibility, and its reuse."""

import json
import os
import shutil
from itertools import groupby

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.config import ModelConfig, SFTConfig
from grpo_dist.data.demonstrations import load_demonstrations
from grpo_dist.demo.model import cached_model
from grpo_dist.policy.model import load_causal_lm
from grpo_dist.runs import cold_start
from grpo_dist.runs.cold_start import padded, response_loss
from grpo_dist.runs.models import resolve_model
from tests.support.made_groups import load_pairs


def settings(**changes) -> SFTConfig:
    data = [{"path": "demo:add3", "examples": 12}]
    small = {"model": "demo:tiny", "data": data, "steps": 3, "batch_size": 4}
    return SFTConfig.model_validate(small | changes)


def run_sft(settings, say):
    return resolve_model(ModelConfig(path="sft"), settings, 0, say)


def chat(*turns):
    """Return the messages of (role, content) ``turns``."""
    return [{"role": role, "content": content} for role, content in turns]


def pairs_file(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def test_loss_is_the_mean_cross_entropy_of_the_response_and_blind_to_the_rest():
    model = load_causal_lm(
        str(cached_model("tiny", seed=0)), dtype=torch.float32, attention="auto", trust_remote_code=False
    )
    tokens = torch.tensor([[5, 60, 61, 62, 63, 1], [5, 70, 71, 1, 0, 0]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]], dtype=torch.bool)
    logprobs = torch.log_softmax(model(tokens).logits, -1)
    by_hand = [logprobs[r, t - 1, tokens[r, t]] for r, t in mask.nonzero().tolist()]
    loss = response_loss(model, tokens, mask)
    assert loss.item() == pytest.approx(-sum(by_hand).item() / 5, rel=1e-6)
    padded_otherwise = torch.cat([tokens, torch.full((2, 3), 9)], dim=1)
    padded_otherwise[1, 4:] = 8
    wider = torch.cat([mask, torch.zeros(2, 3, dtype=torch.bool)], dim=1)
    assert response_loss(model, padded_otherwise, wider).item() == pytest.approx(loss.item(), rel=1e-6)


def test_given_tokens_are_read_and_not_in_the_loss_which_float64_repeats(tmp_path):
    """Loss and gradient come from the learned tokens alone, token by token, in float64."""
    path = pairs_file(
        tmp_path / "sft.jsonl",
        {"prompt": "1", "completion": [{"text": "ab"}, {"text": "cde", "given": True}, {"text": "f"}]},
        {"prompt": "23", "completion": "gh"},
    )
    directory = cached_model("tiny", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = load_pairs(settings(data=path), tokenizer)
    assert rows[0].sampled == [True, True, False, False, False, True, True] and all(rows[1].sampled)
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    marked_learned = []
    for row in rows:
        ids = [*row.prompt, *row.completion]
        logprobs = torch.log_softmax(exact(torch.tensor([ids])).logits[0], -1)
        for i, (token, sampled) in enumerate(zip(row.completion, row.sampled, strict=True), len(row.prompt)):
            marked_learned += [logprobs[i - 1, token]] if sampled else []
    assert len(marked_learned) == 4 + 3
    expected = -torch.stack(marked_learned).mean()
    expected.backward()
    model = load_causal_lm(str(directory), dtype=torch.float32, attention="auto", trust_remote_code=False)
    loss = response_loss(model, *padded(load_demonstrations(settings(data=path), tokenizer)))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient, expected_gradient = (
        torch.cat([p.grad.double().flatten() for _, p in sorted(m.named_parameters())])
        for m in (model, exact)
    )
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5


def test_the_same_settings_give_the_same_weights_and_another_seed_gives_others(tmp_path, monkeypatch):
    weights_by_run = []
    for name, changes in (("a", {}), ("b", {}), ("c", {"seed": 1})):
        monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / name))
        directory = run_sft(settings(**changes), lambda _: None)
        weights_by_run.append(load_file(directory / "model.safetensors"))
    first, second, other = weights_by_run
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not all(torch.equal(first[k], other[k]) for k in first)


def test_a_cold_start_is_made_once_and_repeated_when_the_data_change(tmp_path):
    record = {"prompt": "1+1=", "completion": "2"}
    path = pairs_file(tmp_path / "sft.jsonl", record)
    first = run_sft(settings(data=path, steps=1), lambda _: None)
    messages = []
    run_sft(settings(data=path, steps=1), messages.append)
    assert messages == []
    pairs_file(tmp_path / "sft.jsonl", record | {"completion": "3"})
    assert run_sft(settings(data=path, steps=1), lambda _: None) != first


def test_a_model_that_suggests_a_temperature_keeps_it(tmp_path):
    """transformers loads this generation config, and refuses to save it."""
    start = tmp_path / "start"
    shutil.copytree(cached_model("tiny", seed=0), start)
    (start / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 1}))
    directory = run_sft(settings(model=str(start), steps=1), lambda _: None)
    written = json.loads((directory / "generation_config.json").read_text())
    assert written["temperature"] == 0.6 and written["eos_token_id"] == 1


def test_an_interrupted_cold_start_leaves_nothing_that_passes_for_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))

    def interrupt(message):
        if "step 1/" in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sft(settings(), interrupt)
    assert [name for name in os.listdir(tmp_path) if name.lstrip(".").startswith("sft")] == []


def test_it_learns_the_response_and_where_to_stop(tmp_path):
    path = pairs_file(
        tmp_path / "sft.jsonl", {"prompt": "ab", "completion": "xyz"}, {"prompt": "cd", "completion": "u"}
    )
    directory = run_sft(settings(data=path, steps=40, warmup_steps=4), lambda _: None)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for prompt, completion in (("ab", "xyz"), ("cd", "u")):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert tokenizer.decode(out[0, ids.shape[1] :]) == f"{completion}<|end|>"
    assert model.config.use_cache


@pytest.mark.parametrize(("model", "threads"), [("demo:tiny", 1), ("demo:smollm2", 3), ("a/b", 3)])
def test_only_toys_are_trained_in_one_thread(monkeypatch, tmp_path, model, threads):
    used, toy = [], cached_model("tiny", seed=0)
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    monkeypatch.setattr(cold_start, "available_cpus", lambda: 3)
    monkeypatch.setattr(cold_start, "_train", lambda *_: used.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    cold_start.run_sft(settings(model=model), toy, lambda _: None)
    assert (used, torch.get_num_threads()) == ([threads], before)


def test_a_non_finite_loss_is_refused_before_it_reaches_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"step 2 has loss .*; lower sft\.lr = 1e\+30"):
        run_sft(settings(lr=1e30, warmup_steps=0), lambda _: None)
    assert not list(tmp_path.glob("sft-*"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', ["not valid JSON"]),
        ({"prompt": "a"}, ["`completion` is missing"]),
        ({"prompt": "", "completion": "b"}, ["`prompt` is missing"]),
        ("[]", ["a JSON list", "one JSON object per line"]),
        ({"prompt": "a" * 100, "completion": "b"}, ["104 tokens", "sft.max_length = 64", "raise the limit"]),
        ({"prompt": "a", "completion": "b", "system": 3}, ["`system` is a int; expected str"]),
        (
            {"prompt": "a", "completion": "b", "chat_template": "x"},
            ["`chat_template` = 'x'", "model", "none"],
        ),
        ({"messages": [{"role": "user"}], "completion": "b"}, ["`messages`", "`role` and `content`"]),
        ({"messages": [], "completion": "b"}, ["is no conversation; expected a list of objects"]),
        (
            {"messages": chat(("user", "a")), "prompt": "a", "completion": "b"},
            ["`messages` and `prompt` exclude each other"],
        ),
        ({"prompt": "a", "completion": []}, ["`completion` is missing or neither text nor a list"]),
        ({"prompt": "a", "completion": ["b"]}, ["segment 0", '"given": true']),
        ({"prompt": "a", "completion": [{"text": ""}]}, ["segment 0", "`text` is not empty"]),
        ({"prompt": "a", "completion": [{"text": "b", "given": 1}]}, ["segment 0"]),
        ({"prompt": "a", "completion": [{"text": "b", "given": True}]}, ["the last segment is given"]),
        (
            {"messages": chat(("user", "a"), ("tool", "b"))},
            ["`messages` must end with the assistant's message", "role 'tool'"],
        ),
        ({"messages": chat(("assistant", "a"))}, ["after others"]),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path, line, words):
    path = pairs_file(tmp_path / "sft.jsonl", {"prompt": "a", "completion": "b"}, "", line)
    with pytest.raises(ValueError) as refusal:
        run_sft(settings(data=path, max_length=64), lambda _: None)
    assert str(refusal.value).startswith(f"{path}:3: ")
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "none.jsonl"}, ["sft.data = none.jsonl", "no such file"]),
        ({"data": "demo:sub3"}, ["demo:sub3", "demo:add3"]),
        ({"model": "demo:huge"}, ["demo:huge", "demo:tiny"]),
        ({"model": "none"}, ["sft.model = none", "no such directory"]),
        ({"validation_share": 0.1}, ["sft.validation_share = 0.1", "a stage of a pipeline"]),
    ],
)
def test_missing_data_and_models_are_refused_by_name(changes, words):
    with pytest.raises(ValueError) as refusal:
        run_sft(settings(**changes), lambda _: None)
    for word in words:
        assert word in str(refusal.value)


def pairs(path, **changes):
    """Return the text of the rows with roles and end tokens."""
    tokenizer = AutoTokenizer.from_pretrained(cached_model("tiny", seed=0))
    rows = load_pairs(settings(data=path, **changes), tokenizer)
    return [(tokenizer.decode(pair.prompt), tokenizer.decode(pair.completion)) for pair in rows]


def test_a_row_may_hold_a_system_prompt_a_conversation_or_plain_text(tmp_path):
    path = pairs_file(
        tmp_path / "sft.jsonl",
        {"system": "s", "prompt": "p", "completion": "c"},
        {"prompt": "p", "completion": "c", "chat_template": "none", "further": 1},
        {"messages": chat(("user", "1"), ("assistant", "2"), ("user", "3")), "completion": "4"},
    )
    assert pairs(path) == [
        ("<|system|>s<|user|>p<|assistant|>", "c<|end|>"),
        ("p", "c<|end|>"),
        ("<|user|>1<|assistant|>2<|end|><|user|>3<|assistant|>", "4<|end|>"),
    ]


def marked_learned(path):
    """Return the text of each row with the learned parts in brackets."""
    tokenizer = AutoTokenizer.from_pretrained(cached_model("tiny", seed=0))
    marked = []
    for pair in load_pairs(settings(data=path), tokenizer):
        text = tokenizer.decode(pair.prompt)
        for sampled, run in groupby(zip(pair.sampled, pair.completion, strict=True), lambda t: t[0]):
            part = tokenizer.decode([token for _, token in run])
            text += f"[{part}]" if sampled else part
        marked.append(text)
    return marked


def test_of_a_conversation_the_assistants_messages_are_learned_and_the_tools_given(tmp_path):
    turns = ("system", "s"), ("user", "1"), ("assistant", "2"), ("tool", "3"), ("assistant", "4")
    path = pairs_file(
        tmp_path / "sft.jsonl",
        {"messages": chat(*turns)},
        {"prompt": "1", "completion": [{"text": "2"}, {"text": "3", "given": True}, {"text": "4"}]},
        {"messages": chat(("user", "1"), ("tool", "2")), "completion": "3"},
    )
    assert marked_learned(path) == [
        "<|system|>s<|user|>1<|assistant|>[2<|end|>]<|tool|>3<|assistant|>[4<|end|>]",
        "<|user|>1<|assistant|>[2]3[4<|end|>]",
        "<|user|>1<|tool|>2<|assistant|>[3<|end|>]",
    ]


def test_a_template_that_rewrites_earlier_messages_is_refused_with_file_and_line(tmp_path):
    """For example one that drops the thinking of all turns but the last."""
    tokenizer = AutoTokenizer.from_pretrained(cached_model("tiny", seed=0))
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [("user", "1"), ("assistant", "<think>x</think>2"), ("user", "3"), ("assistant", "4")]
    path = pairs_file(tmp_path / "a.jsonl", {"messages": chat(*turns)})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat template renders .* message 3 otherwise"):
        load_pairs(settings(data=path), tokenizer)


def test_where_a_template_has_no_end_the_next_message_begins_with_it(tmp_path):
    """As in GLM: the model ends an answer with <|user|>, and a call with the token of the tool's result."""
    tokenizer = AutoTokenizer.from_pretrained(cached_model("tiny", seed=0))
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    path = pairs_file(tmp_path / "a.jsonl", {"messages": chat(*turns)})
    [pair] = load_pairs(settings(data=path), tokenizer)
    assert tokenizer.decode(pair.completion) == "2<|user|>3<|assistant|>4<|user|>"
    assert pair.sampled == [True, True, False, False, True, True]
    turns[2] = ("tool", "3")
    path = pairs_file(tmp_path / "b.jsonl", {"messages": chat(*turns)})
    with pytest.raises(ValueError, match=r"b\.jsonl:1: .* does not end .* message 1 with a token that ends"):
        load_pairs(settings(data=path), tokenizer)


def test_sources_are_mixed_with_their_own_counts_and_noise(tmp_path):
    path = pairs_file(tmp_path / "sft.jsonl", *({"prompt": str(i), "completion": "c"} for i in range(5)))
    mixed = pairs(
        [
            {"path": path, "examples": 2},
            {"path": "demo:add3", "examples": 12},
            {"path": "demo:add3", "examples": 3, "noise": 1},
        ]
    )
    assert [p for p, _ in mixed[:2]] == ["<|user|>0<|assistant|>", "<|user|>1<|assistant|>"]
    clean, noisy = mixed[2:14], mixed[14:]
    assert len(clean) == 12 and len(noisy) == 3
    assert all(is_right(*pair) for pair in clean) and not any(is_right(*pair) for pair in noisy)


def is_right(prompt, completion):
    a, b = prompt.removeprefix("<|user|>").removesuffix("=<|assistant|>").split("+")
    return completion.endswith(f"\\boxed{{{int(a) + int(b)}}}<|end|>")


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no rows; expected objects with `prompt` and `completion`"):
        run_sft(settings(data=pairs_file(tmp_path / "sft.jsonl", "")), lambda _: None)
