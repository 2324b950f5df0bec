"""Tasksets of the package verifiers: prompts, and rewards of the last answer.

Tasksets whose tasks have tools, need a container, or have setup and finalize hooks are refused: verifiers
runs them in its harness against a model server, which episodes here do not support.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import verifiers.v1 as vf
from verifiers.v1.state import state_cls
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

from grpo_dist.environments.base import Environment, Message, Problem, Step

_MOST = 1_000_000  # tasks taken from an unbounded taskset


class VerifiersEnvironment(Environment):
    """One task of a taskset. Arguments are the taskset's configuration."""

    target: ClassVar[str]  # id of the installed taskset

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Load the tasks once: a taskset's imports alone take a second of CPU time."""
        _tasks(cls.target, kwargs)

    def start(self, problem: Problem) -> list[Message]:
        index = int(problem.columns["idx"])
        tasks = _tasks(self.target, self._settings)
        self._task = tasks[index] if isinstance(tasks, list) else next(islice(tasks, index, None))
        _check_scored_here(self._task, self.target)
        self._prompt_messages = _messages(self._task.data)
        return self._prompt_messages

    async def step(self, action: str) -> Step:
        """Score the answer with the task's rewards, and end the episode.

        Raises ValueError if a reward is missing: verifiers' sum of the others is not the reward. One that
        raises or returns None is verifiers' TaskError. Either way the sample is not scored.
        """
        task = self._task
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig(), name="policy"),
            is_completed=True,
            ok=True,
        )
        kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
        messages = [*self._prompt_messages, {"role": "assistant", "content": action}]
        for number, message in enumerate(messages):
            message_node = kinds[message["role"]](content=message["content"])
            parent = number - 1 if number else None
            is_last = number == len(messages) - 1
            trace.nodes.append(vf.MessageNode(parent=parent, message=message_node, sampled=is_last))
        await task.score(trace)
        if missing := [name for name, reward in trace.rewards.items() if reward is None] or trace.errors:
            raise ValueError(f"verifiers:{self.target} did not score the answer: {missing}")
        if not trace.rewards:
            raise ValueError(f"verifiers:{self.target} has no reward that it scores outside of its harness")
        return Step(reward=float(trace.reward), done=True)

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the tasks in order. Raises ValueError for a split other than ``train``: tasksets have none,
        so select held-out tasks by their arguments.
        """
        if split != "train":
            raise ValueError(
                f"a taskset of verifiers has no split `{split}`; select held-out tasks by "
                "`environment_kwargs`"
            )
        for index, task in enumerate(islice(_tasks(cls.target, kwargs), count)):
            answer = str(getattr(task.data, "answer", "") or "")
            yield {"problem": task.data.prompt_text, "answer": answer, "idx": index}


def _tasks(name: str, settings: Mapping[str, Any]) -> Iterable[Any]:
    """Return the tasks in order: a list, loaded once per process, or a view of an unbounded taskset."""
    return _loaded(name, json.dumps(settings, sort_keys=True))  # cache keys must be hashable


@lru_cache
def _loaded(name: str, settings: str) -> Iterable[Any]:
    config = taskset_config_type(name).model_validate({**json.loads(settings), "id": name})
    taskset = load_taskset(config)
    return list(taskset) if taskset.bounded else taskset.take(_MOST)


def _check_scored_here(task: Any, name: str) -> None:
    """Raise ValueError for a task that only verifiers' harness can run."""
    reasons = []
    if task.NEEDS_CONTAINER or task.data.image is not None:
        reasons.append("needs a container")
    if type(task).toolsets(task.config):
        reasons.append("has tool servers")
    for hook in ("setup", "finalize"):
        if getattr(type(task), hook) is not getattr(vf.Task, hook):
            reasons.append(f"overrides `{hook}`")
    # `Task.score` skips rewards that it cannot call.
    scorers = {hook.__name__: hook for hook in task.hooks("reward")}
    scorers |= {judge.reward_name: judge.score for judge in task.plugged_judges()}
    for scorer_name, scorer in scorers.items():
        runtime = inspect.signature(scorer).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            reasons.append(f"has the reward `{scorer_name}`, which reads its runtime")
    if reasons:
        raise ValueError(
            f"a task of verifiers:{name} {', '.join(reasons)}; only tasksets of prompts and rewards can be "
            "trained on here"
        )


def _messages(data: Any) -> list[Message]:
    messages: list[Message] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    for message in data.prompt or ():
        if not isinstance(message.content, str):
            raise ValueError("a task has non-text content, which this policy cannot read")
        messages.append({"role": message.role, "content": message.content})
    if not messages:
        raise ValueError(
            "a task without a prompt: the user would speak first, which needs verifiers' harness"
        )
    return messages
