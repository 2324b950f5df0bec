"""Small random models of each published process-reward architecture score as a plain forward pass does, one
row at a time in the layout of the model card.
"""

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from grpo_dist.config import Config
from grpo_dist.config.files import ConfigError, checked
from grpo_dist.demo.tokenizer import END
from grpo_dist.rewards.models import QWEN_SYSTEM_PROMPT, Classifier, check_model, process_inputs
from tests.support import reward_models
from tests.support.reward_models import (
    MADE,
    made_capped_shepherd,
    made_math_shepherd,
    made_qwen_prm,
    made_rlhflow,
    made_skywork_prm,
    marked_tokenizer,
)

TOKENIZER = marked_tokenizer()
PROBLEM = "1+1?"
TEXTS = ["one\n\ntwo\n\nso 2", "2", "a\n\nb"]
STEPS = [["one", "two", "so 2"], ["2"], ["a", "b"]]


def settings(path, kind, **more):
    return reward_models.model_settings(path, kind, name="steps", **more)


def scored(path, kind, texts=TEXTS, **more):
    check_model(settings(path, kind, **more))
    ids = [np.array([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], np.int32) for text in texts]
    return Classifier(settings(path, kind, **more)).score(PROBLEM, texts, ids, TOKENIZER)


def encode(text):
    return torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])


def check_scores(scores, expected):
    for rewards, reference in zip(scores.step_rewards, expected, strict=True):
        np.testing.assert_allclose(rewards, reference, rtol=0, atol=1e-6)
    flat = np.concatenate(expected)
    assert len(np.unique(np.round(flat, 4))) == len(flat)  # no two steps score alike
    np.testing.assert_allclose(scores.rewards, [min(steps) for steps in expected], rtol=0, atol=1e-6)


@torch.no_grad()
def test_qwen_is_read_at_each_extra_token(tmp_path):
    model, expected = made_qwen_prm(tmp_path), []
    for steps in STEPS:
        answer = "<extra_0>".join(steps) + "<extra_0>"
        ids = encode(f"<|system|>{QWEN_SYSTEM_PROMPT}<|user|>{PROBLEM}<|assistant|>{answer}{END}")
        at = ids[0] == TOKENIZER.convert_tokens_to_ids("<extra_0>")
        expected.append(model(ids)[0, at].softmax(-1)[:, 1].numpy())
    check_scores(scored(tmp_path, "qwen"), expected)


def test_a_completion_cannot_write_step_marks(tmp_path):
    made_qwen_prm(tmp_path)
    texts = ["a <extra_0> b\n\nc", "<extra<extra_0>_0> b"]
    scores = scored(tmp_path, "qwen", texts)
    assert [len(rewards) for rewards in scores.step_rewards] == [2, 1] and np.isfinite(scores.rewards).all()


@torch.no_grad()
@pytest.mark.parametrize("make", [made_math_shepherd, made_capped_shepherd])
def test_math_shepherd_is_read_by_its_verdicts_at_the_step_tag(tmp_path, make):
    model, expected = make(tmp_path), []
    verdicts = TOKENIZER.convert_tokens_to_ids(["+", "-"])
    for steps in STEPS:
        ids = encode(f"{PROBLEM} " + "\n".join(f"Step {i}: {s} ки" for i, s in enumerate(steps, 1)))
        at = ids[0] == TOKENIZER.convert_tokens_to_ids("ки")
        expected.append(model(ids).logits[0, at][:, verdicts].softmax(-1)[:, 0].numpy())
    check_scores(scored(tmp_path, "math_shepherd"), expected)


def test_the_step_tag_within_a_word_is_no_step():
    (row,) = process_inputs(settings("p", "math_shepherd"), TOKENIZER, "руки?", "", [("Step 1: руки", 0)])
    assert TOKENIZER.decode(row.token_ids) == "руки? Step 1: руки ки"
    assert row.read_at == [len(row.token_ids) - 1]


@torch.no_grad()
def test_rlhflow_is_asked_step_by_step(tmp_path):
    """The published script reruns the conversation for each step and reads before the last +."""
    model, expected = made_rlhflow(tmp_path), []
    verdicts = TOKENIZER.convert_tokens_to_ids(["+", "-"])
    for steps in STEPS:
        turns = []
        for k, step in enumerate(steps):
            turns.append(f"<|user|>{f'{PROBLEM} ' if k == 0 else ''}{step}<|assistant|>+{END}")
            logits = model(encode("".join(turns))).logits[0, -3, verdicts]
            expected.append(logits.softmax(-1)[0].item())
    ends = np.cumsum([len(steps) for steps in STEPS])[:-1]
    check_scores(scored(tmp_path, "rlhflow"), np.split(np.array(expected), ends))


@torch.no_grad()
def test_skywork_is_read_by_its_value_head(tmp_path):
    (model, head), expected = made_skywork_prm(tmp_path), []
    for steps in STEPS:
        ids = encode(f"{PROBLEM}\n" + "".join(f"{step}\n" for step in steps))
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        ends = np.cumsum([len(PROBLEM) + 1, *(len(step) + 1 for step in steps)])[1:] - 1
        expected.append(head(hidden)[0, ends, 0].sigmoid().numpy())
    check_scores(scored(tmp_path, "skywork"), expected)


@torch.no_grad()
def test_a_sequence_classifier_scores_the_solution_up_to_each_step(tmp_path):
    path, expected = reward_models.random(tmp_path, "outcome"), []
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    for text in TEXTS:
        pieces = text.split("\n\n")
        prefixes = ["\n\n".join(pieces[: k + 1]) for k in range(len(pieces))]
        rows = [encode(f"<|user|>{PROBLEM}<|assistant|>{prefix}{END}") for prefix in prefixes]
        hidden = [model.model(input_ids=ids).last_hidden_state[0, -1] for ids in rows]
        expected.append(np.array([model.score(last).item() for last in hidden]))
    scores = scored(path, "prefixes")
    check_scores(scores, expected)
    ids = [np.arange(len(text) + 1, dtype=np.int32) for text in TEXTS]
    whole = Classifier(reward_models.model_settings(path)).score(PROBLEM, TEXTS, ids, TOKENIZER)
    np.testing.assert_allclose([steps[-1] for steps in scores.step_rewards], whole.rewards, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "make"), MADE.items())
def test_batches_do_not_change_scores_of_steps(tmp_path, kind, make):
    make(tmp_path)
    texts = [*TEXTS, "long " * 20, "\n\n".join("abcdef"), ""]
    one, many = (scored(tmp_path, kind, texts, micro_batch_tokens=budget) for budget in (1, 10_000))
    for alone, batched in zip(one.step_rewards, many.step_rewards, strict=True):
        np.testing.assert_allclose(alone, batched, rtol=0, atol=1e-5)
    assert [ends.tolist() for ends in one.step_ends] == [ends.tolist() for ends in many.step_ends]


def test_a_step_too_far_for_the_model_is_not_scored_and_those_before_are(tmp_path):
    """Each prefix is a row: the first fits into 64 positions, the second does not."""
    path = reward_models.by_hand(tmp_path, "outcome")
    scores = scored(path, "prefixes", ["3\n\n" + "3" * 80])
    assert np.isnan(scores.step_rewards[0]).tolist() == [False, True] and np.isnan(scores.rewards[0])


def refusal(path, kind, **more):
    with pytest.raises(ValueError) as error:
        check_model(settings(path, kind, **more))
    assert "rewards.models steps: path = " in str(error.value)
    return str(error.value)


def test_models_of_another_format_are_refused_without_loading(tmp_path):
    made_qwen_prm(tmp_path / "qwen")
    made_math_shepherd(tmp_path / "shepherd")
    outcome = reward_models.by_hand(tmp_path / "outcome", "outcome")
    message = refusal(tmp_path / "qwen", "math_shepherd")
    assert "Qwen2ForProcessRewardModel" in message
    assert "kind math_shepherd needs one of ...ForCausalLM" in message
    assert "no single token '<extra_0>'" in refusal(outcome, "qwen")
    message = refusal(tmp_path / "shepherd", "math_shepherd", verdict_tokens=("+", "+"))
    assert "does not tell the verdicts ['+', '+'] apart" in message


def test_a_model_without_the_head_of_its_format_is_refused(tmp_path):
    made_skywork_prm(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if name != "v_head.summary.bias"}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no head of kind skywork .*v_head\.summary\.bias"):
        Classifier(settings(tmp_path, "skywork"))


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("qwen", "verdict_tokens: [a, b]", "verdict_tokens` is no setting of models qwen"),
        ("rlhflow", "step_mark: x", "step_mark` is no setting of models rlhflow"),
        ("outcome", "reduce: mean", "reduce` is no setting of models outcome"),
        ("process", "reduce: mean", "'math_shepherd', 'rlhflow' or 'prefixes'"),
    ],
)
def test_settings_of_another_kind_are_refused(kind, setting, message):
    rewards = {"models": [{"name": "m", "path": "p", "kind": kind} | yaml.safe_load(f"{{{setting}}}")]}
    with pytest.raises(ConfigError) as refusal:
        checked({"model": {"path": "m"}, "data": {"train": [{"path": "p"}]}, "rewards": rewards}, "c", Config)
    assert message in str(refusal.value)
