"""Guarantees: environments of verifiers, reasoning-gym and openenv-core, unmodified, give prompts,
observations and rewards of their own, from one line of configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig
from grpo_dist.data.prompts import PromptFormat, build_prompts
from grpo_dist.data.readers import read
from grpo_dist.data.tasks import own_problems, source_tasks
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.base import Problem
from grpo_dist.environments.records import Action, Observed
from grpo_dist.environments.runner import EpisodeRunner
from grpo_dist.types import Prompt
from tests.support.other_packages import interpreter_with, server_of
from tests.support.patience import HANG_S


def _prompts(environments: EnvironmentsConfig, **source: Any) -> list[Prompt]:
    own = DataSourceConfig(**source)
    data = DataConfig(train=(own,))
    rows = read(own, own_problems(data, environments))
    tokenizer = character_tokenizer()
    tasks = source_tasks(data, environments, own, rows, tokenizer)
    return build_prompts(rows, tokenizer, PromptFormat.of(data), max_prompt_tokens=9000, tasks=tasks).prompts


def _play(environments: EnvironmentsConfig, prompt: Prompt, actions: Sequence[str]) -> list[Observed]:
    async def played() -> list[Observed]:
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

    return asyncio.run(played())


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


_TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Config(vf.TasksetConfig):
    last: int = 4
    left_out: list[int] = []


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(1, self.config.last):
            if i in self.config.left_out:
                continue
            yield Sum(Data(prompt=f"{i}+{i}=", system_prompt="Add.", answer=str(2 * i)), self.config.task)
"""


def test_a_taskset_of_verifiers_gives_prompts_and_weighted_rewards(tmp_path: Path) -> None:
    (tmp_path / "my_sums.py").write_text(_TASKSET)
    environments = EnvironmentsConfig(
        python=interpreter_with("verifiers"), code_paths=(str(tmp_path),), timeout_s=HANG_S
    )
    prompts = _prompts(
        environments, environment="verifiers:my_sums", environment_kwargs={"last": 4, "left_out": [3]}
    )
    assert [(p.text, p.answer) for p in prompts] == [("1+1=", "2"), ("2+2=", "4")]
    assert prompts[0].task is not None
    assert [m["role"] for m in prompts[0].task.messages] == ["system", "user"]
    for text, reward in [("4", 1.5), ("5", 0.5), ("it is 4", 0.0)]:
        (observed,) = _play(environments, prompts[1], [text])
        assert (observed.reward, observed.done, observed.failed) == (reward, True, "")


_SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Told(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.number, self.count = 0, 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.count = (seed or 0) % 10, 0
        return Told(text=f"Guess a number below 10 (seed {seed}).", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        if action.message == str(self.number):
            return Told(text="right", done=True, reward=1.0)
        side = "low" if int(action.message) < self.number else "high"
        return Told(text=f"too {side}", done=False, reward=0.0)

    @property
    def state(self):
        return State(episode_id="e", step_count=self.count)


app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


def test_a_server_of_openenv_plays_several_turns(tmp_path: Path) -> None:
    python = interpreter_with("openenv")
    environments = EnvironmentsConfig(python=python, timeout_s=HANG_S)
    with server_of(_SERVER, python, tmp_path) as url:
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
