"""Reward models: scores worked by hand, invariance to batching, and rejected models."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from grpo_dist.config import RewardsConfig
from grpo_dist.demo.tokenizer import END, character_tokenizer
from grpo_dist.rewards.models import Classifier, check_model
from tests.support.reward_models import by_hand, model_settings, random

TOKENIZER = character_tokenizer()
TEXTS = ["1\n\n2", "3", "x\n\n3\n\n1", ""]


def token_ids(texts):
    end = TOKENIZER.convert_tokens_to_ids(END)
    return [np.array([*TOKENIZER(text)["input_ids"], end], np.int32) for text in texts]


def score(path, kind, texts=TEXTS, **settings):
    model = Classifier(model_settings(path, kind, **settings))
    return model.score("1+1", texts, token_ids(texts), TOKENIZER)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_an_outcome_model_is_read_at_the_end_of_the_conversation(tmp_path):
    """The last token ends the turn and is also the padding: the classifier must not skip it."""
    scores = score(by_hand(tmp_path, "outcome"), "outcome")
    assert scores.rewards.dtype == np.float32 and scores.step_rewards is None
    assert scores.rewards == pytest.approx([4.0, 4.0, 4.0, 4.0])


def test_without_a_chat_template_problem_and_completion_are_plain_text(tmp_path):
    """Scored at the last character: for an empty completion the line break after the problem."""
    scores = score(by_hand(tmp_path, "outcome", template=False), "outcome")
    assert scores.rewards == pytest.approx([-1.0, 2.0, 0.5, 3.0])


@pytest.mark.parametrize("kind", ["outcome", "classifier"])
def test_no_keys_and_values_are_cached(tmp_path, kind):
    """By default transformers keeps the keys and values of all layers for the whole batch."""
    model, caches = Classifier(model_settings(by_hand(tmp_path, kind), kind)), []
    decoder = model._model.base_model
    decoder.register_forward_hook(lambda _, __, output: caches.append(output.get("past_key_values")))
    model.score("1+1", TEXTS, token_ids(TEXTS), TOKENIZER)
    assert caches and not any(caches)


def test_two_labels_give_the_probability_of_the_second(tmp_path):
    scores = score(by_hand(tmp_path, "outcome", labels=2, template=False), "outcome")
    assert scores.rewards == pytest.approx(sigmoid(np.array([-1.0, 2.0, 0.5, 3.0])))


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("min", [-1.0, 2.0, 0.0]), ("mean", [-0.25, 2.0, 2.5 / 3]), ("last", [-1.0, 2.0, 0.5])],
)
def test_a_process_model_scores_each_step(tmp_path, reduce, expected):
    """With an empty mark, each step is scored at its last character."""
    scores = score(by_hand(tmp_path, "classifier"), "classifier", TEXTS[:3], reduce=reduce, step_mark="")
    assert [rewards.tolist() for rewards in scores.step_rewards] == [
        pytest.approx([0.5, -1.0]), pytest.approx([2.0]), pytest.approx([0.0, 2.0, 0.5])
    ]  # fmt: skip
    assert [ends.tolist() for ends in scores.step_ends] == [[2, 4], [1], [2, 5, 7]]
    assert all(rewards.dtype == np.float32 for rewards in scores.step_rewards)
    assert all(ends.dtype == np.int32 for ends in scores.step_ends)
    assert scores.rewards == pytest.approx(expected)


def test_a_pair_too_long_for_the_model_is_not_scored(tmp_path, caplog):
    """64 positions: <|user|>1+1<|assistant|> takes 5, the end of the turn 1, and so 58 characters fit."""
    scores = score(by_hand(tmp_path / "o", "outcome"), "outcome", ["3" * 58, "3" * 59])
    np.testing.assert_allclose(scores.rewards, [4.0, np.nan], rtol=1e-6)
    assert "65 tokens, but the model takes at most 64" in caplog.text
    scores = score(by_hand(tmp_path / "p", "classifier"), "classifier", ["1\n\n" + "3" * 60, "1"])
    np.testing.assert_allclose(scores.rewards, [np.nan, 3.0], rtol=1e-6)
    assert np.isnan(scores.step_rewards[0]).tolist() == [True, True]
    assert scores.step_ends[0].tolist() == [2, 63]


@pytest.mark.parametrize("kind", ["outcome", "classifier"])
def test_batches_do_not_change_scores(tmp_path, kind):
    texts = ["12+3\n\n=15", "a", "long " * 20, "x\n\ny\n\nz", END, f"{END}{END}"]
    path = random(tmp_path, kind)
    one, many = (score(path, kind, texts, micro_batch_tokens=budget) for budget in (1, 10_000))
    np.testing.assert_allclose(one.rewards, many.rewards, rtol=0, atol=1e-5)
    assert len(set(np.round(one.rewards, 4).tolist())) == len(texts)


def test_scores_equal_the_scores_of_the_plain_model(tmp_path):
    """Compares with transformers alone, one row at a time."""
    path = random(tmp_path, "outcome", labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    expected = []
    for text in TEXTS:
        ids = TOKENIZER(f"<|user|>1+1<|assistant|>{text}{END}", add_special_tokens=False)["input_ids"]
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        expected.append(model.score(hidden).softmax(-1)[1].item())
    assert score(path, "outcome").rewards == pytest.approx(expected, abs=1e-6)


def refusal(path, **settings):
    with pytest.raises(ValueError) as error:
        check_model(model_settings(path, name="quality", **settings))
    assert "rewards.models quality" in str(error.value)
    return str(error.value)


def test_models_of_another_kind_are_refused_without_loading(tmp_path, tiny_model):
    outcome, three = by_hand(tmp_path / "o", "outcome"), random(tmp_path / "3", "outcome", labels=3)
    check_model(model_settings(outcome))
    message = refusal(outcome, kind="classifier")
    assert "Qwen2ForSequenceClassification" in message and "...ForTokenClassification" in message
    assert "Qwen2ForCausalLM" in refusal(tiny_model)
    assert "3 labels" in refusal(three)
    assert "no such directory" in refusal(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "configuration or tokenizer cannot be loaded" in refusal(tmp_path / "empty")


def test_a_classifier_without_a_head_is_rejected(tmp_path, tiny_model):
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no weights for score\.weight"):
        Classifier(model_settings(tmp_path))


def test_conflicting_process_models_are_rejected():
    steps = [{"name": name, "path": "p", "kind": "classifier"} for name in "ab"]
    with pytest.raises(ValueError, match="two rewards of steps"):
        RewardsConfig.model_validate({"models": steps})
    with pytest.raises(ValueError, match="shuffle = true"):
        RewardsConfig.model_validate({"models": steps[:1], "shuffle": True})


def test_the_mark_is_the_separator_unless_another_is_set(tmp_path):
    path = by_hand(tmp_path, "classifier", labels=2)
    assert score(path, "classifier").rewards == pytest.approx([sigmoid(3.0)] * 4)
    assert score(path, "classifier", step_mark="a2").rewards == pytest.approx([sigmoid(-1.0)] * 4)
    lines = score(path, "classifier", ["1\n2\n\n3"], step_separator="\n", step_mark="")
    assert lines.step_rewards[0] == pytest.approx(sigmoid(np.array([0.5, -1.0, 2.0])))
    assert lines.step_ends[0].tolist() == [1, 4, 6]


def test_an_empty_completion_is_one_step(tmp_path):
    scores = score(by_hand(tmp_path, "classifier"), "classifier", [""])
    assert scores.step_rewards[0] == pytest.approx([3.0]) and scores.step_ends[0].tolist() == [0]
