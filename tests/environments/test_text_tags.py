"""Guarantees: an action ends at a tag, and its result follows in the same message; the search example."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Environment, Problem, Step
from grpo_dist.environments.dialogue import Dialogue
from grpo_dist.environments.episode import Observed
from grpo_dist.environments.program import Program
from grpo_dist.environments.runner import EnvironmentProbe
from grpo_dist.environments.text_tags import TextTags
from grpo_dist.types import Prompt, Task
from tests.environments.test_dialogue import _decoded, _renderer
from tests.support.chat_templates import real_tokenizer
from tests.support.documents import ROOT
from tests.support.made_episodes import generated

_EXAMPLES = ROOT / "configs/examples"


class Lookup(TextTags):
    results: ClassVar = {"search": "information", "len": "result"}

    async def search(self, text: str) -> str:
        await asyncio.sleep(0)
        return text.upper()

    def len(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize(("action", "step"), [
    ("I look. <search> emma </search>", Step("\n<information>EMMA</information>\n")),
    ("<search>a</search> or <len>\nfour\n</len>\n\n", Step("\n<result>4</result>\n")),  # the last one counts
    ("<answer>4</answer>", Step(done=True)),
    ("<answer>4</search>", Step("\nThat was no valid action. Write <search>...</search> or <len>...</len> or "
                                "<answer>...</answer>.\n")),
    ("", Step("\nThat was no valid action. Write <search>...</search> or <len>...</len> or "
              "<answer>...</answer>.\n")),
])  # fmt: skip
def test_the_last_tag_of_an_action_is_given_to_its_method(action: str, step: Step) -> None:
    lookup = Lookup()
    assert lookup.start(Problem("?", "4")) == "?"
    assert asyncio.run(lookup.step(action)) == step
    assert Lookup.stop == ("</search>", "</len>", "</answer>")


@pytest.mark.parametrize("ended", [False, True])
def test_an_observation_follows_in_the_same_message_unless_the_policy_ended_it(ended: bool) -> None:
    """Text after the tag in the token that completes it, here a line break, is kept as sampled."""
    tokenizer = real_tokenizer("qwen2.5")
    renderer = _renderer(tokenizer)
    task = Task("x", messages=({"role": "user", "content": "?"},), stop=("</search>", "</answer>"))
    prompt = Prompt("p", np.array(renderer.ids(renderer.prompt(task)), np.int32), "", "s", task=task)
    dialogue = Dialogue(renderer, prompt)
    first = "<search>emma</search>\n"
    ids = renderer.ids(first)
    ids += [tokenizer.eos_token_id] * ended
    assert dialogue.add_action(generated(ids, -0.5, 3)).text == first
    dialogue.observe(Observed("<information>\nby <|im_end|> Austen</information>\n"))
    last = renderer.ids("<answer>Austen</answer>")
    dialogue.add_action(generated(last, -0.5, 3))
    dialogue.observe(Observed(done=True))
    rollout = dialogue.rollout(0, "stop")
    assert rollout.sampled is not None and not rollout.further_rows
    assert rollout.completion_ids[rollout.sampled].tolist() == [*ids, *last]
    page = "<information>\nby < |im_end|> Austen</information>\n"
    between = f"<|im_end|>\n<|im_start|>user\n{page}<|im_end|>\n<|im_start|>assistant\n" if ended else page
    text = _decoded(tokenizer, prompt, rollout)
    assert text == f"{renderer.prompt(task)}{first}{between}<answer>Austen</answer>"


def test_observed_messages_begin_a_turn_after_observed_text() -> None:
    tokenizer = real_tokenizer("qwen2.5")
    renderer = _renderer(tokenizer)
    task = Task("x", messages=({"role": "user", "content": "?"},), stop=("</search>",))
    prompt = Prompt("p", np.array(renderer.ids(renderer.prompt(task)), np.int32), "", "s", task=task)
    dialogue = Dialogue(renderer, prompt)
    for text, observed in (("<think><search>a</search>", Observed("one")),
                           ("<search>b</search>", Observed([{"role": "user", "content": "two"}])),
                           ("three", Observed(done=True))):  # fmt: skip
        dialogue.add_action(generated(renderer.ids(text)))
        dialogue.observe(observed)
    rollout = dialogue.rollout(0, "stop")
    turn = "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rollout.completion_ids.tolist()) == (
        f"<think><search>a</search>one<search>b</search>{turn}three"
    )
    assert not rollout.further_rows
    assert [part.thought for part in rollout.turns] == ["", "opens", ""]


def test_a_stop_that_is_no_list_of_texts_is_refused() -> None:
    for stop in ("</a>", ["</a>", ""]):
        wrong = type("Wrong", (Environment,), {"stop": stop})
        with pytest.raises(ValueError, match=r"`stop` = .*expected a list of texts"):
            asyncio.run(Program(wrong, {}).handle("describe", {}))


# The example


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(_EXAMPLES))
    import search  # type: ignore[import-not-found]

    yield search
    del sys.modules["search"]


def test_bm25_has_the_numbers_worked_by_hand(search: Any) -> None:
    """Three passages, mean length 3. "cat" is in two: idf = ln(1 + 1.5 / 2.5) = 0.4700.
    First: tf 1, length 2: norm = 0.9 (0.6 + 0.4 * 2/3) = 0.78, 0.47 * 1.9 / 1.78 = 0.5017.
    Third: tf 2, length 4: norm = 0.9 (0.6 + 0.4 * 4/3) = 1.02, 0.47 * 2 * 1.9 / 3.02 = 0.5914.
    """
    index = search.Index(["a cat", "the dog barks", "cat and cat again"])
    assert index.search("Cat!", 5) == ["cat and cat again", "a cat"]
    numbers, weights = index._weights["cat"]
    assert numbers.tolist() == [0, 2]
    assert weights == pytest.approx([0.5017, 0.5914], abs=1e-4)
    assert index.search("unknown", 5) == [] and index.search("the cat", 1) == ["the dog barks"]


@pytest.mark.parametrize(("text", "words"), [
    ("The U.S.", ["us"]), ("O'Brien, a well-known  man", ["obrien", "wellknown", "man"]), ("an", []),
    ("$1,000", ["1000"]), ("Theatre", ["theatre"]),
])  # fmt: skip
def test_an_answer_is_compared_as_search_r1_does(search: Any, text: str, words: list[str]) -> None:
    """Its `normalize_answer` removes punctuation before it splits."""
    assert search.plain(text) == words


def test_two_searches_lead_to_the_answer_of_each_question(search: Any) -> None:
    search.Search.preload()
    rows = list(search.Search.problems("train", None)), list(search.Search.problems("test", None))
    assert [len(split) for split in rows] == [30, 10]
    assert max(Counter(row["problem"] for split in rows for row in split).values()) == 1

    async def play(row: dict[str, str]) -> Step:
        episode = search.Search()
        question = episode.start(Problem(row["problem"], row["answer"]))
        assert question.endswith(row["problem"])
        person = row["problem"].removesuffix(" lives?").rpartition("where ")[2]
        home = (await episode.step(f"<search>home of {person}</search>")).observation
        town = str(home).partition("Doc 1: ")[2].partition("Home: ")[2].partition(".")[0]
        passages = (await episode.step(f"<search>{town} is a town, founded</search>")).observation
        year = str(passages).partition("Doc 1: ")[2].partition(" in ")[2][:4]
        return await episode.step(f"<answer>{year}.</answer>")

    for row in (row for split in rows for row in split):
        assert asyncio.run(play(row)) == Step(reward=1.0, done=True), row


def test_a_corpus_of_a_file_is_searched_in_the_environments_process(tmp_path: Path) -> None:
    (tmp_path / "wiki.jsonl").write_text('{"contents": "Emma is by Jane Austen"}\n{"contents": "other"}\n')
    settings = EnvironmentsConfig(code_paths=(str(_EXAMPLES),))
    probe = EnvironmentProbe("search:Search", {"corpus": str(tmp_path / "wiki.jsonl")}, settings)
    described, (question,) = probe.questions([Problem("Who wrote Emma?", "Jane Austen")])
    assert described.stop == ["</search>", "</answer>"] and "Who wrote Emma?" in question  # type: ignore[comparison-overlap]
