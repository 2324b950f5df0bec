"""The check of the environments: each takes one action of a trial episode, as in the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Problem
from grpo_dist.environments.calls import CODE, resolve_format
from grpo_dist.environments.preparation import Description, EnvironmentProbe
from grpo_dist.environments.records import Action, Call, Observed
from grpo_dist.environments.rendering import template_text
from grpo_dist.environments.runner import EpisodeRunner
from grpo_dist.runs.prepare import load_tokenizer
from grpo_dist.tools.check.context import CheckFailed, CheckSkipped, Context, NotApplicable
from grpo_dist.types import Prompt, Task

_SHOWN = 200  # characters of an observation
# Calls that the tools of this package answer with 42.
_TRIALS = {"python": "print(6 * 7)", "calculator": "6 * 7"}


def check_environments(context: Context) -> str:
    """Play one action with each environment, and say how the policy's code is confined."""
    config = context.config
    if not config.has_environments:
        raise NotApplicable
    if context.prepared is None:
        raise CheckSkipped("the prompts cannot be prepared")
    prompts = [*context.prepared.prompts, *(p for own in context.prepared.eval_sets for p in own.prompts)]
    first = _first_of_each(prompts)
    described = [
        EnvironmentProbe(task.environment, task.kwargs, config.environments).describe() for task, _ in first
    ]
    notes, answers = asyncio.run(_played(config.environments, first, described))
    tokenizer = load_tokenizer(context.prepared.model_dir, config.model.trust_remote_code)
    form = resolve_format(config.environments.call_format, template_text(tokenizer, config.data))
    lines = [*notes]
    failed: list[str] = []
    for (task, _), own, (action, observed) in zip(first, described, answers, strict=True):
        if observed.failed:
            failed.append(f"a trial action failed: {observed.failed}")
        tools = ", ".join(tool["function"]["name"] for tool in own.tools)
        calls = f"; tools: {tools}, called {_form(form)}" if tools else ""
        lines.append(f"{task.environment}{calls}")
        lines.append(f"  | {action.text!r} is answered with {_shown(observed)}")
    if failed:
        raise CheckFailed(*failed)
    return "\n    ".join(lines)


def _first_of_each(prompts: Sequence[Prompt]) -> list[tuple[Task, Prompt]]:
    """Return each environment with its arguments, and its first prompt."""
    found: dict[str, tuple[Task, Prompt]] = {}
    for prompt in prompts:
        if prompt.task is not None:
            key = json.dumps([prompt.task.environment, dict(prompt.task.kwargs)], sort_keys=True, default=str)
            found.setdefault(key, (prompt.task, prompt))
    return list(found.values())


async def _played(
    settings: EnvironmentsConfig, first: Sequence[tuple[Task, Prompt]], described: Sequence[Description]
) -> tuple[list[str], list[tuple[Action, Observed]]]:
    runner = EpisodeRunner(settings)
    try:
        notes = await runner.start(sandboxed=any(own.sandboxed for own in described))
        answers = []
        for number, ((task, prompt), own) in enumerate(zip(first, described, strict=True)):
            action = _trial(prompt, own)
            problem = Problem(prompt.text, prompt.answer, prompt.columns)
            episode = f"check:{number}"
            answers.append((action, await runner.act(episode, task, problem, action, turn=0)))
            await runner.end(episode)
        return notes, answers
    finally:
        await runner.close()


def _trial(prompt: Prompt, described: Description) -> Action:
    """Return a call of a tool of this package; without one, the problem's answer."""
    for tool in described.tools:
        name = tool["function"]["name"]
        if name in _TRIALS:
            return Action(_TRIALS[name], (Call(name, _TRIALS[name], raw=True),))
    return Action(prompt.answer)


def _form(call_format: str) -> str:
    return "in code blocks" if call_format == CODE else f"as {call_format} does"


def _shown(observed: Observed) -> str:
    if observed.calls:
        return ", ".join(f"{call.result.strip()[:_SHOWN]!r} ({call.outcome})" for call in observed.calls)
    parts = [] if not observed.observation else [repr(str(observed.observation)[:_SHOWN])]
    parts += [] if observed.reward is None else [f"reward {observed.reward:g}"]
    parts += ["the end of the episode"] if observed.done else []
    return ", ".join(parts)
