"""The check of the environments: each answers the first actions of a trial episode, as in the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Problem
from grpo_dist.environments.calls import CODE, resolve_format
from grpo_dist.environments.preparation import Description, EnvironmentProbe
from grpo_dist.environments.records import Action, Call, Observed
from grpo_dist.environments.rendering import template_text
from grpo_dist.environments.runner import EpisodeRunner
from grpo_dist.runs.prepare import load_tokenizer
from grpo_dist.tools.check.inputs import CheckFailed, CheckSkipped, Inputs, NotApplicable
from grpo_dist.types import Prompt, Task

_SHOWN = 200  # characters of an observation
# Calls that the tools of this package answer with 42.
_TRIALS = {"python": "print(6 * 7)", "calculator": "6 * 7"}


def check_environments(inputs: Inputs) -> str:
    """Play a trial episode with each environment, and say how the policy's code is confined."""
    config = inputs.config
    if not config.has_environments:
        raise NotApplicable
    if inputs.prepared is None:
        raise CheckSkipped("the prompts cannot be prepared")
    prompts = [*inputs.prepared.prompts, *(p for own in inputs.prepared.eval_sets for p in own.prompts)]
    first = _first_of_each(prompts)
    described = [
        EnvironmentProbe(task.environment, task.kwargs, config.environments).describe() for task, _ in first
    ]
    notes, answers = asyncio.run(_played(config.environments, first, described))
    tokenizer = load_tokenizer(inputs.prepared.model_dir, config.model.trust_remote_code)
    form = resolve_format(config.environments.call_format, template_text(tokenizer, config.data))
    lines = [*notes]
    failed: list[str] = []
    for (task, prompt), own, answered in zip(first, described, answers, strict=True):
        tools = ", ".join(map(_signature, own.tools))
        calls = f"; tools: {tools}, called {_form(form)}" if tools else ""
        lines.append(f"{task.environment}{calls}")
        lines += _not_told(own, tokenizer.decode(prompt.token_ids.tolist()))
        lines += [f"  | {action.text!r} is answered with {_shown(observed)}" for action, observed in answered]
        failed += [f"a trial action failed: {o.failed}" for _, o in answered if o.failed]
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
) -> tuple[list[str], list[list[tuple[Action, Observed]]]]:
    runner = EpisodeRunner(settings)
    try:
        notes = await runner.start(sandboxed=any(own.sandboxed for own in described))
        answers: list[list[tuple[Action, Observed]]] = []
        for number, ((task, prompt), own) in enumerate(zip(first, described, strict=True)):
            problem = Problem(prompt.text, prompt.answer, prompt.columns)
            episode = f"check:{number}"
            actions = [*_trial_calls(own), *([] if own.stateless else [Action(prompt.answer)])]
            answers.append(
                [(a, await runner.act(episode, task, problem, a, turn=t)) for t, a in enumerate(actions)]
            )
            await runner.end(episode)
        return notes, answers
    finally:
        await runner.close()


def _trial_calls(described: Description) -> list[Action]:
    """Return a call of each tool of this package; those of users may do anything."""
    names = [tool["function"]["name"] for tool in described.tools]
    return [Action(_TRIALS[n], (Call(n, _TRIALS[n], raw=True),)) for n in names if n in _TRIALS]


def _signature(schema: Mapping[str, Any]) -> str:
    """Return a tool with its arguments, those in brackets optional: middle(low, high, [rounding])."""
    function = schema["function"]
    needed = function["parameters"].get("required", ())
    names = (name if name in needed else f"[{name}]" for name in function["parameters"]["properties"])
    return f"{function['name']}({', '.join(names)})"


def _not_told(described: Description, prompt: str) -> list[str]:
    """Return a line where the first prompt does not name a tool: then it may never be called."""
    absent = [f"`{n}`" for tool in described.tools if (n := tool["function"]["name"]) not in prompt]
    if not absent:
        return []
    return [
        f"  | the prompt does not name {', '.join(absent)}: describe tools and their form in "
        "`data.system_prompt`, unless the policy knows them from demonstrations"
    ]


def _form(call_format: str) -> str:
    return "in code blocks" if call_format == CODE else f"as {call_format} does"


def _shown(observed: Observed) -> str:
    if observed.calls:
        return ", ".join(f"{call.result.strip()[:_SHOWN]!r} ({call.outcome})" for call in observed.calls)
    parts = [] if not observed.observation else [repr(str(observed.observation)[:_SHOWN])]
    parts += [] if observed.reward is None else [f"reward {observed.reward:g}"]
    parts += ["the end of the episode"] if observed.done else []
    return ", ".join(parts)
