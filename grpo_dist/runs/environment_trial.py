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
from grpo_dist.runs.checking import CheckFailed, CheckSkipped, Start
from grpo_dist.runs.prepare import load_tokenizer
from grpo_dist.runtime.stage_log import stage
from grpo_dist.types import Prompt, Task

_SHOWN = 200  # characters of an observation
# Calls that the tools of this package answer with 42.
_HARMLESS = ("ok", "malformed")  # made arguments may not fit what a type does not say
_TRIALS = {"python": "print(6 * 7)", "calculator": "6 * 7"}


def check_environments(start: Start) -> str:
    """Play a trial episode with each environment, in which each tool is called once, and say how the policy's
    code is confined.
    """
    config = start.config
    if not config.has_environments:
        return ""
    if start.prepared is None:
        raise CheckSkipped("the prompts cannot be prepared")
    prompts = [*start.prepared.prompts, *(p for own in start.prepared.eval_sets for p in own.prompts)]
    first = _first_of_each(prompts)
    with stage("environments", "each plays a trial episode"):
        described = [
            EnvironmentProbe(task.environment, task.kwargs, config.environments).describe()
            for task, _ in first
        ]
        notes, answers = asyncio.run(_played(config.environments, first, described))
    tokenizer = load_tokenizer(start.prepared.model_dir, config.model.trust_remote_code)
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
        for call in (call for _, o in answered for call in o.calls if call.outcome not in _HARMLESS):
            start.warn(
                f"environment {task.environment}: a call of {call.name} with {call.arguments} gives "
                f"{call.outcome}: {call.result[:_SHOWN]}; the policy reads that as its result: correct the "
                "tool, unless such arguments are wrong"
            )
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
    """Return a call of each tool, those of users with made arguments of the types that they declare."""
    return [_trial_call(tool["function"]) for tool in described.tools]


def _trial_call(function: Mapping[str, Any]) -> Action:
    if (name := function["name"]) in _TRIALS:
        return Action(_TRIALS[name], (Call(name, _TRIALS[name], raw=True),))
    made = json.dumps(_example(function["parameters"], function["parameters"].get("$defs", {})))
    return Action(f"{name}({made})", (Call(name, made),))


def _example(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> Any:
    """Return a small value of the JSON ``schema`` with all that it requires. ``defined``: by name."""
    if "$ref" in schema:
        return _example(defined.get(schema["$ref"].rpartition("/")[2], {}), {})
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if choices := schema.get("enum") or schema.get("examples"):
        return choices[0]
    if inner := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return _example(inner[0], defined)
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return {name: _example(properties.get(name, {}), defined) for name in schema.get("required", ())}
        case "array":
            return [_example(schema.get("items", {}), defined)] * max(1, schema.get("minItems", 1))
        case "integer" | "number":
            return max(1, schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1)
        case "boolean":
            return True
        case "null":
            return None
    return "1"


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
