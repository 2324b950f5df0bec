"""Guarantees: environments of verifiers, reasoning-gym and openenv-core, unmodified, give their
prompts, observations and rewards, from one line of configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig
from grpo_dist.data.prompts import PromptFormat, build_prompts
from grpo_dist.data.readers import read
from grpo_dist.data.tasks import environment_problems, source_tasks
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Observed
from grpo_dist.environments.runner import EpisodeRunner
from grpo_dist.types import Prompt
from tests.support.other_packages import game_server, interpreter_with, server_of, taskset
from tests.support.patience import HANG_S


def _prompts(environments: EnvironmentsConfig, **source: Any) -> list[Prompt]:
    train = DataSourceConfig(**source)
    data = DataConfig(train=(train,))
    rows = read(train, environment_problems(data, environments))
    tokenizer = character_tokenizer()
    tasks = source_tasks(data, environments, train, rows, tokenizer)
    form = PromptFormat.from_config(data)
    return build_prompts(rows, tokenizer, form, max_prompt_tokens=9000, tasks=tasks).prompts


def _play(environments: EnvironmentsConfig, prompt: Prompt, actions: Sequence[str]) -> list[Observed]:
    async def run() -> list[Observed]:
        runner = EpisodeRunner(environments)
        assert prompt.task is not None
        problem = Problem(prompt.text, prompt.answer, prompt.columns)
        try:
            return [
                await runner.act("a", prompt.task, problem, Action(text), turn=turn)
                for turn, text in enumerate(actions)
            ]
        finally:
            await runner.close()

    return asyncio.run(run())


def _verifiers(directory: Path) -> EnvironmentsConfig:
    python = interpreter_with("verifiers")
    return EnvironmentsConfig(python=python, code_paths=(str(directory),), timeout_s=HANG_S)


@pytest.mark.slow
def test_reasoning_gym_scores_its_own_problems() -> None:
    environments = EnvironmentsConfig(python=interpreter_with("reasoning_gym"), timeout_s=HANG_S)
    source = {"environment": "reasoning_gym:chain_sum", "environment_kwargs": {"max_terms": 3, "seed": 5}}
    first, second = _prompts(environments, **source, max_rows=2)
    assert first.text != second.text and first.source == "chain_sum" and int(first.answer)
    held_out = _prompts(environments, **source, max_rows=2, split="test")
    assert {p.text for p in held_out}.isdisjoint({first.text, second.text})
    for text, reward in [
        (f"<answer>{first.answer}</answer>", 1.0),
        (f"so it is \\boxed{{{first.answer}}}.", 1.0),
        (first.answer, 1.0),
        ("<answer>none of these</answer>", 0.0),
    ]:
        (observed,) = _play(environments, first, [text])
        assert (observed.reward, observed.done, observed.failed) == (reward, True, "")


@pytest.mark.slow
def test_a_taskset_of_verifiers_gives_prompts_and_weighted_rewards(tmp_path: Path) -> None:
    (tmp_path / "my_sums.py").write_text(taskset("reply == answer", metric="right", short=4))
    environments = _verifiers(tmp_path)
    kwargs = {"last": 4, "left_out": [3]}
    prompts = _prompts(environments, environment="verifiers:my_sums", environment_kwargs=kwargs)
    assert [(p.text, p.answer) for p in prompts] == [("1+1=", "2"), ("2+2=", "4")]
    assert prompts[0].task is not None
    assert [m["role"] for m in prompts[0].task.messages] == ["system", "user"]
    for text, reward in [("4", 1.5), ("5", 0.5), ("it is 4", 0.0)]:
        (observed,) = _play(environments, prompts[1], [text])
        assert (observed.reward, observed.done, observed.failed) == (reward, True, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [("return 1 / 0", "division by zero"), ("return None", "NoneType"), ("raise TimeoutError", "timed out")],
)
def test_a_reward_of_verifiers_that_fails_is_not_scored(tmp_path: Path, fault: str, words: str) -> None:
    """Otherwise the sum of the other rewards, or 0, would count as the score."""
    code = taskset("reply == answer", metric="right", short=4)
    (tmp_path / "my_sums.py").write_text(code.replace("return float(reply == answer)", fault))
    environments = _verifiers(tmp_path)
    (prompt, *_) = _prompts(environments, environment="verifiers:my_sums", environment_kwargs={"last": 4})
    (observed,) = _play(environments, prompt, ["2"])
    assert observed.reward is None and words in observed.failed


_JUDGE = """
import verifiers.v1 as vf

__all__ = ["RunsTheReply"]


class RunsTheReply(vf.Judge[float]):
    async def score(self, task: vf.TaskData, trace: vf.Trace, runtime) -> float:
        return 1.0
"""


_HOOKS = """class Sum(vf.Task[Data]):
    async def setup(self, trace, runtime):
        self.key = self.data.answer

    async def finalize(self, trace, runtime):
        self.said = trace.last_reply
"""


@pytest.mark.slow
def test_tasks_that_only_the_harness_of_verifiers_scores_are_refused(tmp_path: Path) -> None:
    """Their rewards would read what nothing has set, or be left out, and right answers would get 0."""
    code = taskset("reply == answer", metric="right", short=4)
    (tmp_path / "my_sums.py").write_text(code.replace("class Sum(vf.Task[Data]):\n", f"{_HOOKS}\n"))
    (tmp_path / "my_judge.py").write_text(_JUDGE)
    environments = _verifiers(tmp_path)
    judges = {"task": {"judges": [{"id": "my_judge"}]}}
    with pytest.raises(ValueError) as error:
        _prompts(environments, environment="verifiers:my_sums", environment_kwargs=judges)
    assert (
        "a task of verifiers:my_sums overrides `setup`, overrides `finalize`, has the reward `my_judge`, "
        "which reads its runtime; only tasksets of prompts and rewards can be trained on here"
    ) in str(error.value)


_STEP = """
if said == str(self.number):
    return Told(text="right", done=True, reward=1.0)
side = "low" if int(said) < self.number else "high"
return Told(text=f"too {side}", done=False, reward=0.0)
"""


@pytest.mark.slow
def test_a_server_of_openenv_plays_several_turns(tmp_path: Path) -> None:
    python = interpreter_with("openenv")
    environments = EnvironmentsConfig(python=python, timeout_s=HANG_S)
    server = game_server("Guess a number below 10 (seed {seed}).", _STEP, sessions=8)
    with server_of(server, python, tmp_path) as url:
        source = {"environment": f"openenv:{url}", "environment_kwargs": {"instruction": "A game."}}
        # More problems than the server has sessions: each is closed before the next.
        prompts = _prompts(environments, **source, max_rows=12, name="game")
        assert prompts[4].task is not None
        assert prompts[4].task.messages[0]["content"] == "A game.\nGuess a number below 10 (seed 4)."
        observed = _play(environments, prompts[4], ["2", "7", "4"])
        assert [(o.observation, o.reward, o.done, o.failed) for o in observed] == [
            ("too low", 0.0, False, ""), ("too high", 0.0, False, ""), ("", 1.0, True, "")
        ]  # fmt: skip
        (failed,) = _play(environments, prompts[4], ["no number"])
        assert failed.failed and failed.reward is None
