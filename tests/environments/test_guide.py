"""Guarantee: the code in the guide works unchanged: `check`, and episodes of its environment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grpo_dist.cli import main
from grpo_dist.config.files import load_config
from grpo_dist.environments.base import Problem
from grpo_dist.environments.builtin import calculator
from grpo_dist.environments.episode import Action, Call, Observed
from grpo_dist.environments.runner import Description, EpisodeRunner
from grpo_dist.environments.tools import typed_tools
from grpo_dist.runs.start import load_inputs
from grpo_dist.runs.trials import _not_told, _signature
from tests.support.documents import ROOT, blocks
from tests.support.tiers import slow_after

_GUIDE = ROOT / "grpo_dist/guides/write_an_environment.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for block in blocks(_GUIDE):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_check_shows_the_environment_its_tools_and_an_answer(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["check", "guess.yaml"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "rows for training: 50 of Guess; held out: 50 of held_out" in output
    question = "<|user|>Guess a number below 100. Answer with the number alone.<|assistant|>"
    assert f"computes the expression in it.{question}" in output
    assert "games:Guess; tools: calculator(expression), called in code blocks" in output
    assert "the prompt does not name" not in output
    assert "'6 * 7' is answered with '42' (ok)" in output


def test_check_says_where_the_policy_is_not_told_of_a_tool() -> None:
    def middle(low: int, high: int, rounding: str = "down") -> int:
        """Return the middle."""
        return (low + high) // 2

    tools = tuple(tool.schema for tool in typed_tools([calculator, middle]).values())
    described = Description(tools, False, True, False, False, True)
    assert [_signature(tool) for tool in tools] == ["calculator(expression)", "middle(low, high, [rounding])"]
    (line,) = _not_told(described, "Guess; a block in the language calculator computes.")
    assert "the prompt does not name `middle`: describe tools and their form in `data.system_prompt`" in line
    assert _not_told(described, "calculator, middle") == []


@pytest.mark.slow
def test_an_episode_of_the_guide_reaches_its_end(here: Path) -> None:
    config = load_config(here / "guess.yaml")
    inputs = load_inputs(config, print)
    prompt, held_out = inputs.prompts[3], inputs.eval_sets[0].prompts[3]
    assert (prompt.answer, held_out.answer, held_out.source) == ("6", "7", "held_out")
    assert prompt.token_ids.tolist() == held_out.token_ids.tolist(), "the number is not in the question"

    async def play() -> list[Observed]:
        runner = EpisodeRunner(config.environments)
        assert prompt.task is not None
        problem = Problem(prompt.text, prompt.answer, prompt.columns)
        call = Call("calculator", "3*2", raw=True)
        actions = [Action("50"), Action("more"), Action("", (call,)), Action("6")]
        try:
            return [
                await runner.act("a", prompt.task, problem, action, turn=turn)
                for turn, action in enumerate(actions)
            ]
        finally:
            await runner.close()

    first, second, third, last = asyncio.run(play())
    assert (first.observation, first.reward) == ("Too high.", 0.0)
    assert (second.observation, second.reward) == ("Answer with a number.", -0.1)
    assert third.calls[0].result == "6" and third.reward is None
    assert last.done and last.reward == 1.0


@pytest.mark.slow
def test_check_shows_the_environment_that_answers_in_batches(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join(f'{{"problem": "say {n}", "answer": "{n}"}}' for n in range(4))
    (here / "rows.jsonl").write_text(rows)
    text = (here / "guess.yaml").read_text().replace(", split: test", "")
    judged = text.replace('environment: "games:Guess"', 'environment: "judged:Judged", path: rows.jsonl')
    (here / "judged.yaml").write_text(judged)
    status = main(["check", "judged.yaml", "data.overlap=warn", "data.eval=[]"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "judged:Judged" in output and "reward 1" in output


@pytest.mark.slow
@pytest.mark.parametrize(("part", "broken", "words"), slow_after([
    ("def start(self, problem):", "def start(self):", ["Guess/train:1", "start: TypeError", "every row"]),
    ("return Step(reward=1.0, done=True)", "return 1.0", ["trial action failed", "a float, expected a Step"]),
    ("import calculator", "import abacus", ["`games` cannot be imported", "abacus", "code_paths"]),
    ("class Guess(Environment)", "class Guess", ["not a subclass of Environment"]),
    ("tools = [calculator]", "tools = [int]", ["environment games:Guess: tool `int` is not a function"]),
], 2))  # fmt: skip
def test_what_is_wrong_with_an_environment_is_reported_before_a_run(
    here: Path, capsys: pytest.CaptureFixture[str], part: str, broken: str, words: list[str]
) -> None:
    games = here / "games.py"
    assert part in games.read_text()
    games.write_text(games.read_text().replace(part, broken))
    assert main(["check", "guess.yaml"]) == 2
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert all(word in output for word in words), output
