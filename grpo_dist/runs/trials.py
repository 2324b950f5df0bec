"""The trials before a start: user-supplied code is called on small test inputs, a right and a wrong answer
are scored, and each environment answers the first actions of a trial episode, as in the run. A check returns
its result as text, or raises.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_dist.config import Config, EnvironmentsConfig, RewardsConfig, SamplingConfig
from grpo_dist.config.environments import AGENT
from grpo_dist.config.secrets import masked_text
from grpo_dist.data.columns import distinct_of, sources_of
from grpo_dist.data.order import chosen
from grpo_dist.data.readers import SourceRows, common_columns
from grpo_dist.environments.base import Problem
from grpo_dist.environments.dialogue import template_text
from grpo_dist.environments.episode import Action, Call, Generation, Observed
from grpo_dist.environments.runner import Description, EnvironmentProbe, EpisodeRunner
from grpo_dist.environments.tools import CODE, resolve_format
from grpo_dist.environments.user_rollout import UserRollout
from grpo_dist.errors import Refused, count_failures, raised, refuse
from grpo_dist.loop.metrics import user_metric
from grpo_dist.plugins.algorithm import (
    UserCode,
    kl_estimate,
    user_advantages,
    user_aggregation,
    user_policy_loss,
)
from grpo_dist.plugins.inputs import (
    AdvantageInputs,
    AggregationInputs,
    KLInputs,
    MetricInputs,
    OrderInputs,
    PolicyLossInputs,
    RolloutInputs,
    SinkInputs,
)
from grpo_dist.plugins.user_code import (
    ADVANTAGE,
    AGGREGATION,
    KL,
    LOSS,
    METRIC,
    ORDER,
    ROLLOUT,
    SINK,
    Kind,
    UserCodeFailed,
    UserComponent,
    check_signature,
    load,
    start_thread,
    takes,
)
from grpo_dist.rewards.checks import column_problems, graded_problems
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import REWARDS
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.rewards.text import alternatives
from grpo_dist.rewards.thought import resolve_thought
from grpo_dist.runs.prepare import RunInputs, scoring_problems
from grpo_dist.runtime.hardware import DeviceType, device_type
from grpo_dist.runtime.stage_log import stage
from grpo_dist.types import Group, Prompt, Rollout, Sampling, Task, Thought

ENVIRONMENT = "environment"  # reward by the environment, which needs turns
_WRONG = "-987654321"
# Formats of an answer: a reward may ask for any of them. The two texts differ only in the answer.
_ANSWERS = ("The answer is \\boxed{{{answer}}}.", "I work it out step by step.\n#### {answer}", "{answer}")
_THOUGHT_ANSWERS = ("<answer>The answer is \\boxed{{{answer}}}.</answer>", "<answer>{answer}</answer>")
_REMEDY = (
    "set `rewards.trial` to a right and a wrong completion of the first problem, and the trial is decisive: "
    "{right: ..., wrong: ...}, with {answer} for the answer"
)
_SHOWN = 200  # characters of an observation
_HARMLESS = ("ok", "malformed")  # test arguments may not fit: types do not say everything
# Calls that the tools of this package answer with 42.
_TOOL_INPUTS = {"python": "print(6 * 7)", "calculator": "6 * 7"}
TRIAL_S = 60.0  # deadline per component, with its imports
_ROWS, _TOKENS, _CLOSE = 4, 6, 1e-4
_INPUTS: dict[Kind, type[Any]] = {
    ADVANTAGE: AdvantageInputs, LOSS: PolicyLossInputs, KL: KLInputs, AGGREGATION: AggregationInputs,
    METRIC: MetricInputs, SINK: SinkInputs, ORDER: OrderInputs, ROLLOUT: RolloutInputs,
}  # fmt: skip


class CheckSkipped(Exception):
    """The check needs something that another check could not read, or that is unknown before a run."""


@dataclass
class Start:
    """A run that is about to start, and the results of earlier checks; None: unreadable, or not read yet.

    Attributes:
        say: receives notes and warnings of the checks.
        train_first: whether a cold start may train; else the model is the one that it starts from.
        workers_device: of the run's workers, which may be on another machine; None: as on this machine.
        rows: of `data.train` and `data.eval`.
        is_cold_started: the model of the cold start exists already.
        longest_demonstration: of the cold start, tokens.
        warnings: messages of `say` that are also events.
    """

    config: Config
    say: Callable[[str], None]
    train_first: bool = False
    workers_device: DeviceType | None = None
    rows: tuple[list[SourceRows], list[SourceRows]] | None = None
    model_dir: Path | None = None
    is_cold_started: bool = False
    longest_demonstration: int | None = None
    inputs: RunInputs | None = None
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def device(self) -> DeviceType:
        return self.workers_device or device_type()

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")
        self.warnings.append(f"warning: {message}")


@dataclass(frozen=True)
class RewardTrial:
    """``texts``, ``totals``: of the right and of the wrong answer. ``parts``: each reward's two scores.
    ``failures``: why rewards gave no score. ``raised``: a reward failed, instead of returning None or NaN.
    ``raised_elsewhere``: failures of the other formats of the answer in which a reward failed.
    """

    texts: tuple[str, str]
    totals: tuple[float, float]
    parts: dict[str, tuple[float, float]]
    failures: tuple[str, ...]
    raised: bool
    raised_elsewhere: tuple[str, ...] = ()

    @property
    def separates(self) -> bool:
        """Return whether the right answer scores higher."""
        return self.totals[0] > self.totals[1]

    @property
    def inverts(self) -> bool:
        """Return whether the wrong answer scores higher."""
        return self.totals[0] < self.totals[1]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {right:g} and {wrong:g}" for name, (right, wrong) in self.parts.items())
        lines = [f"a right and a wrong answer get {parts}"]
        for word, total, text in zip(("right", "wrong"), self.totals, self.texts, strict=True):
            lines.append(f"  | {word}, {total:g} in all: {text!r}")
        return "\n    ".join(lines)


def check_reward(start: Start) -> str:
    """Score a right and a wrong answer to the first prompt with the graders of the run, or to the first
    prompt of each training and evaluation source, if sources have their own rewards.

    It is an error if rewards fail in every format of an answer. It is also an error if the right answer does
    not score higher than the wrong one, if all rewards are built in or `rewards.trial` has the two answers;
    else the formats are guesses, and it is a warning.
    """
    rewards = start.config.rewards
    scoring = stage("reward", "a right and a wrong answer are scored")
    with scoring, GraderPool.from_config(rewards, 2) as pool:
        try:
            return _check_all(start, pool)
        except CheckSkipped as reason:  # the stage has not failed
            skipped = reason
    raise skipped


def _check_all(start: Start, pool: GraderPool) -> str:
    rewards = start.config.rewards
    for advantage, estimator_rewards in start.config.rewards_by_estimator:
        refuse(graded_problems(estimator_rewards, advantage))
    refuse(scoring_problems(rewards, start.config.sampling, pool))
    if not rewards.all_functions:
        raise CheckSkipped("`rewards.functions` is empty, and reward models are not asked before a run")
    refuse(
        problem
        for sources in start.rows or ()
        for source, rows in sources
        for problem in column_problems(
            rewards, distinct_of(rows), "add it to the data", partial(common_columns, source), pool=pool
        )
    )
    _warn_of_boxes(start)
    if not rewards.by_source:
        return _check_source(start, rewards, _first_prompt(start), pool)
    if start.inputs is None:
        raise CheckSkipped("the data cannot be read, so there is no problem of each source to answer")
    first: dict[str, Prompt] = {}
    for prompts in (start.inputs.prompts, *(eval_set.prompts for eval_set in start.inputs.eval_sets)):
        for index, source in enumerate(sources_of(prompts)):
            if source not in first:
                first[source] = prompts[index]
    results, failed, skipped = [], [], []
    for source, prompt in first.items():
        try:
            result = _check_source(start, rewards.select_source(source), prompt, pool)
            results.append(f"source {source}: {result}")
        except Refused as error:
            failed.append(f"source {source}: {error}")
        except CheckSkipped as reason:
            skipped.append(f"source {source}: {reason}")
    refuse(failed)
    if not results:
        raise CheckSkipped("; ".join(skipped))
    return "\n    ".join([*results, *(f"not checked: {text}" for text in skipped)])


def _warn_of_boxes(start: Start) -> None:
    """Warn of training sources whose rows ask for a box, if math accepts other answers by default."""
    rewards = start.config.rewards
    if start.rows is None or "require_box" in rewards.model_fields_set:
        return
    asking = dict.fromkeys(
        rows[0].source
        for _, rows in start.rows[0]
        if _has_math(rewards.select_source(rows[0].source))
        and "\\boxed" in "\n".join([rows[0].problem, *(str(m["content"]) for m in rows[0].messages)])
    )
    if asking:
        start.warn(
            f"rewards: the first problem of {', '.join(asking)} asks for \\boxed{{}}, but a number in babble "
            "may be right, too; set `rewards.require_box: true`, or to false to keep it so"
        )


def _has_math(rewards: RewardsConfig) -> bool:
    return "math" in {function.function for function in rewards.functions}


def _check_source(start: Start, rewards: RewardsConfig, prompt: Prompt | None, pool: GraderPool) -> str:
    if not rewards.functions:
        raise CheckSkipped("reward models are not asked before a run")
    if all(reward.function == ENVIRONMENT for reward in rewards.functions):
        raise CheckSkipped("the reward is the sum of what the environment gives for each turn")
    if prompt is None:
        raise CheckSkipped("the data cannot be read, so there is no problem to answer")
    trial = try_rewards(rewards, start.config.sampling, prompt, pool)
    text = str(trial)
    if rewards.require_box and _has_math(rewards):
        text += "\n    only an answer in \\boxed{} counts (`rewards.require_box`)"
    if rewards.models:
        text += "\n    reward models are not asked"
    reasons = "; ".join(trial.failures)
    decisive = rewards.trial is not None or all(f.function in REWARDS for f in rewards.all_functions)
    if trial.failures and (trial.raised or decisive):
        raise Refused(f"{text}\n    not scored: {reasons}")
    if trial.raised_elsewhere:
        start.warn(
            f"rewards: not scored in another usual form of an answer: {'; '.join(trial.raised_elsewhere)}. "
            "Samples for which a function raises are not trained on; correct it"
        )
    functions = dict.fromkeys(reward.function for reward in rewards.functions)
    unknown = [name for name in functions if name in REWARDS and not REWARDS[name].knows_right_answers]
    if unknown and rewards.trial is None and not trial.separates and not trial.inverts:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise CheckSkipped(f"no right answer to {names} is known before a run, so it is not tried")
    if trial.separates:
        return text
    if is_blind(rewards) and rewards.trial is None:
        return f"{text}\n    no reward here looks at whether an answer is right"
    if decisive:
        raise Refused(
            f"{text}\n    the right answer must score higher: look at the answer {prompt.answer!r} of the "
            "data, and at `rewards.functions`, their weights and the form in which they expect an answer"
        )
    why = f"was not scored: {reasons}" if reasons else "got no more than a wrong one"
    start.warn(f"rewards: a right answer in its usual forms {why}. If you expect otherwise, {_REMEDY}")
    return text


def try_rewards(
    rewards: RewardsConfig, sampling: SamplingConfig, prompt: Prompt, pool: GraderPool
) -> RewardTrial:
    """Try each format of an answer until the right answer scores higher than the wrong one, or lower.

    If neither happens, return the first format that all rewards score. Reward models and environments are not
    asked. Raises ValueError for rewards that cannot be used.
    """
    # Functions that a reward model or the environment gates are scored without their gate.
    absent = [model.name for model in rewards.models]
    absent += [f.label for f in rewards.functions if f.function == ENVIRONMENT]
    functions = tuple(
        f.model_copy(update={"gate": None}) if f.gate in absent else f
        for f in rewards.functions
        if f.function != ENVIRONMENT
    )
    settings = rewards.model_copy(update={"functions": functions, "models": (), "by_source": {}})
    tried: list[RewardTrial] = []
    scorer = Scorer(settings.select_source("").functions, pool)
    try:
        for texts in _answers(rewards, prompt):
            tried.append(_try_answers(scorer, settings, sampling, prompt, texts))
            if tried[-1].separates or tried[-1].inverts:
                break
    finally:
        scorer.close()
    scored = next((trial for trial in tried if not trial.failures), tried[0])
    chosen = tried[-1] if tried[-1].separates or tried[-1].inverts else scored
    others = [reason for trial in tried if trial.raised and trial is not chosen for reason in trial.failures]
    return replace(chosen, raised_elsewhere=tuple(dict.fromkeys(others)))


def _try_answers(
    scorer: Scorer, settings: RewardsConfig, sampling: SamplingConfig, prompt: Prompt, texts: tuple[str, str]
) -> RewardTrial:
    before = {name: counts.total() for name, counts in scorer.failures.items()}
    rollouts = [_make_rollout(prompt, i, text) for i, text in enumerate(texts)]
    longest = sampling.longest
    scores = scorer.score(
        CompletionGroup.from_rollouts(prompt, rollouts, max_new_tokens=longest, settings=settings)
    )
    raised = any(counts.total() > before.get(name, 0) for name, counts in scorer.failures.items())
    parts = {name: (float(part[0]), float(part[1])) for name, part in scores.parts.items()}
    failures = dict(count_failures(reason for reasons in scores.failures for reason in reasons))
    return RewardTrial(
        texts, (float(scores.rewards[0]), float(scores.rewards[1])), parts, tuple(failures), raised
    )


def _answers(rewards: RewardsConfig, prompt: Prompt) -> list[tuple[str, str]]:
    """Return pairs of a right and a wrong completion: the user's, or one pair per usual format."""
    right = alternatives(prompt.answer)[0]
    if (trial := rewards.trial) is not None:
        return [(trial.right.replace("{answer}", right), trial.wrong.replace("{answer}", right))]
    return [
        (before + form.format(answer=right), before + form.format(answer=_WRONG))
        for before, form in _forms(resolve_thought(prompt.thought, rewards))
    ]


def _forms(thought: Thought) -> list[tuple[str, str]]:
    """Return pairs of a thought, closed where the prompt opens it, and a format of the answer."""
    opening = "" if thought.prompt == "opens" else f"{thought.opening}\n"
    closed = f"{opening}I work it out step by step.\n{thought.closing}\n"
    before = "" if thought.prompt == "closes" else closed
    plain = before if thought.prompt == "opens" else ""
    first, *others = [(plain, form) for form in _ANSWERS]
    return [first, *((before, form) for form in _THOUGHT_ANSWERS), *others]


def is_blind(rewards: RewardsConfig) -> bool:
    """Return whether no reward function with a weight depends on the answer: a wrong answer may score as high
    as a right one.
    """
    builtin = [REWARDS.get(reward.function) for reward in rewards.functions if reward.weight]
    return all(function is not None and function.is_blind for function in builtin)


def _make_rollout(prompt: Prompt, sample: int, text: str) -> Rollout:
    """Make a rollout of ``text`` with one token per word."""
    ids = np.arange(3, 3 + len(text.split()), dtype=np.int32)
    return Rollout(
        prompt.uid, sample, ids, np.zeros(len(ids), np.float32), "stop", text, np.zeros(len(ids), np.int32)
    )


def _first_prompt(start: Start) -> Prompt | None:
    """Return the first prompt; without a tokenizer, the first row with a dummy token."""
    if start.inputs is not None:
        return start.inputs.prompts[0]
    if start.rows is None:
        return None
    row = start.rows[0][0][1][0]
    return Prompt("first", np.array([1], np.int32), row.answer, row.source, row.problem, dict(row.columns))


def check_environments(start: Start) -> str:
    """Play a trial episode with each environment that calls each tool once, and report how the policy's code
    is confined.
    """
    config = start.config
    if not config.has_environments:
        return ""
    if start.inputs is None:
        raise CheckSkipped("the prompts cannot be prepared")
    sets = (start.inputs.prompts, *(eval_set.prompts for eval_set in start.inputs.eval_sets))
    first = _first_of_each(chain.from_iterable(sets))
    with stage("environments", "each plays a trial episode"):
        described = [
            EnvironmentProbe(task.environment, task.kwargs, config.environments).describe()
            for task, _ in first
        ]
        notes, answers = asyncio.run(_play(config.environments, first, described))
    tokenizer = start.inputs.tokenizer
    form = resolve_format(config.environments.call_format, template_text(tokenizer, config.data))
    called = "in code blocks" if form == CODE else f"as {form} does"
    lines = [*notes]
    failed: list[str] = []
    for (task, prompt), description, answered in zip(first, described, answers, strict=True):
        tools = ", ".join(map(_signature, description.tools))
        calls = f"; tools: {tools}, called {called}" if tools else ""
        lines.append(f"{task.environment}{calls}")
        lines += _not_told(description, tokenizer.decode(prompt.token_ids.tolist()))
        lines += [
            f"  | {action.text!r} is answered with {_describe(observed)}" for action, observed in answered
        ]
        failed += [f"a trial action failed: {o.failed}" for _, o in answered if o.failed]
        for call in (call for _, o in answered for call in o.calls if call.outcome not in _HARMLESS):
            start.warn(
                f"environment {task.environment}: a call of {call.name} with {call.arguments} gives "
                f"{call.outcome}: {call.result[:_SHOWN]}; the policy reads that as its result: correct the "
                "tool, unless such arguments are wrong"
            )
    if failed:
        raise Refused(*failed)
    return "\n    ".join(lines)


def _first_of_each(prompts: Iterable[Prompt]) -> list[tuple[Task, Prompt]]:
    """Return each environment with its arguments, and its first prompt."""
    first: dict[str, tuple[Task, Prompt]] = {}
    for prompt in prompts:
        if prompt.task is not None:
            key = json.dumps([prompt.task.environment, dict(prompt.task.kwargs)], sort_keys=True, default=str)
            first.setdefault(key, (prompt.task, prompt))
    return list(first.values())


async def _play(
    settings: EnvironmentsConfig, first: Sequence[tuple[Task, Prompt]], described: Sequence[Description]
) -> tuple[list[str], list[list[tuple[Action, Observed]]]]:
    runner = EpisodeRunner(settings)
    try:
        notes = await runner.start(sandboxed=any(environment.sandboxed for environment in described))
        answers: list[list[tuple[Action, Observed]]] = []
        for number, ((task, prompt), environment) in enumerate(zip(first, described, strict=True)):
            problem = Problem(prompt.text, prompt.answer, prompt.columns)
            episode = f"check:{number}"
            is_agent = task.environment.startswith(AGENT)  # an agent asks before the first action
            actions = [Action("")] if is_agent else _trial_answers(environment, prompt.answer)
            episode_answers: list[tuple[Action, Observed]] = []
            calls = [_trial_call(tool["function"]) for tool in environment.tools]
            for turn, action in enumerate([*calls, *([] if environment.stateless else actions)]):
                episode_answers.append((action, await runner.act(episode, task, problem, action, turn=turn)))
                if episode_answers[-1][1].done:
                    break
            answers.append(episode_answers)
            await runner.end(episode)
        return notes, answers
    finally:
        await runner.close()


def _trial_answers(described: Description, answer: str) -> list[Action]:
    """Return ``answer``, in each of the tags that end an action."""
    tags = [text[2:-1] for text in described.stop if text.startswith("</") and text.endswith(">")]
    return [Action(f"<{tag}>{answer}</{tag}>") for tag in tags] or [Action(answer)]


def _trial_call(function: Mapping[str, Any]) -> Action:
    """Return a call of a tool; user tools get test arguments of their declared types."""
    if (name := function["name"]) in _TOOL_INPUTS:
        return Action(_TOOL_INPUTS[name], (Call(name, _TOOL_INPUTS[name], raw=True),))
    arguments = json.dumps(_example(function["parameters"], function["parameters"].get("$defs", {})))
    return Action(f"{name}({arguments})", (Call(name, arguments),))


def _example(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> Any:
    """Return a small value of the JSON ``schema`` with all required fields. ``defined``: schemas by name."""
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
    """Return a tool with its arguments, optional ones in brackets: middle(low, high, [rounding])."""
    function = schema["function"]
    needed = function["parameters"].get("required", ())
    names = (name if name in needed else f"[{name}]" for name in function["parameters"]["properties"])
    return f"{function['name']}({', '.join(names)})"


def _not_told(described: Description, prompt: str) -> list[str]:
    """Return a line if the first prompt does not name a tool: the policy may never call it."""
    absent = [f"`{n}`" for tool in described.tools if (n := tool["function"]["name"]) not in prompt]
    if not absent:
        return []
    return [
        f"  | the prompt does not name {', '.join(absent)}: describe tools and their form in "
        "`data.system_prompt`, unless the policy knows them from demonstrations"
    ]


def _describe(observed: Observed) -> str:
    if observed.calls:
        return ", ".join(f"{call.result.strip()[:_SHOWN]!r} ({call.outcome})" for call in observed.calls)
    text = observed.observation
    if (request := observed.request) is not None:
        text = request.get("prompt") or json.dumps(request.get("messages"), ensure_ascii=False)
    parts = [] if not text else [repr(str(text)[:_SHOWN])]
    parts += [] if observed.reward is None else [f"reward {observed.reward:g}"]
    parts += ["the end of the episode"] if observed.done else []
    return ", ".join(parts)


def user_code_problems(
    components: Sequence[UserComponent], code_paths: Sequence[str], tokenizer: Any = None
) -> Iterator[str]:
    """Yield a message for every component that cannot be used. Imports and runs user code. Environments are
    tried by `data.tasks`, rewards by `rewards.registry`, and data sources when they are read.

    ``tokenizer``: of the model, for a rollout function, which is not called if it is None.
    """
    for component in components:
        if component.kind not in _INPUTS:
            continue
        error = _failure(partial(_try, component, code_paths, tokenizer))
        if isinstance(error, UserCodeFailed):
            error = error.__cause__
        elif isinstance(error, ValueError):
            yield f"`{component.key}` = {component.name}: {error}"
            continue
        # A test input lacks names of the run's rewards, metrics and columns. Losses read no names.
        is_name = isinstance(error, KeyError) and component.kind not in (LOSS, KL, AGGREGATION)
        if error is not None and not is_name:
            reason = masked_text(raised(error))
            yield f"`{component.key}` = {component.name} fails on a small test input ({reason}); correct it"


def weight_problems(config: Config) -> Iterator[str]:
    """Yield a message for every reward whose weight differs between sources, for a user-supplied estimator
    that gets `weights`. Imports it.
    """
    for component in config.user_components:
        if component.kind is ADVANTAGE:
            estimator = load(ADVANTAGE, component.name, config.code_paths)
            if takes(estimator, "weights"):
                yield from config.rewards.check_common_weights(component.name)


def _failure(trial: Callable[[], None]) -> BaseException | None:
    """Return what ``trial`` raises; a ValueError where it takes longer than `TRIAL_S`."""
    done = start_thread(trial, "trial of user-supplied code")
    if not futures.wait([done], TRIAL_S).done:
        return ValueError(f"it did not return within {TRIAL_S:g} s on a small test input; correct it")
    return done.exception()


def _try(component: UserComponent, code_paths: Sequence[str], tokenizer: Any) -> None:
    """Call ``component`` on a test input. Raises its errors."""
    kind, name = component.kind, component.name
    function = load(kind, name, code_paths)
    in_list = kind in (METRIC, SINK)
    arguments = "rollout.function_kwargs" if kind is ROLLOUT else f"{component.key}{'.N' * in_list}.kwargs"
    check_signature(function, _INPUTS[kind], component.kwargs, f"{kind.title} {name}", arguments)
    if kind in (ADVANTAGE, LOSS, KL, AGGREGATION):
        _TRIALS[kind](name, UserCode.from_pieces(code_paths, [component]))
    elif kind is METRIC:
        inputs = MetricInputs(1, _trial_groups(), {"reward/mean": 0.5})
        user_metric(name, code_paths, component.kwargs, inputs, "trial")
    elif kind is SINK:
        if absent := [method for method in ("log", "table", "close") if not hasattr(function, method)]:
            raise ValueError(f"sink {name} has no method `{absent[0]}`; expected log, table and close")
    elif kind is ORDER:
        order_inputs = OrderInputs(1, 2, [_trial_prompt(i) for i in range(6)], {"p0": (1.0, 4.0)}, 0)
        first = chosen(name, code_paths, component.kwargs, order_inputs)
        if chosen(name, code_paths, component.kwargs, order_inputs) != first:
            raise ValueError(f"prompt order {name} gives two answers to the same inputs; draw from `seed`")
    elif kind is ROLLOUT and tokenizer is not None:
        _try_rollout(UserRollout(name, function, component.kwargs), tokenizer)


def _try_advantage(name: str, code: UserCode) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, torch.nan, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    parts = {"trial": torch.nan_to_num(rewards)}
    inputs = AdvantageInputs(
        rewards, torch.arange(8) // 4, torch.arange(1, 9), torch.arange(8) == 7, parts, {"trial": 1.0}
    )
    user_advantages(name, code, inputs)


def _try_loss(name: str, code: UserCode) -> None:
    values = _trial_values()
    logprobs = values[0].requires_grad_()
    inputs = PolicyLossInputs(logprobs, values[1], values[2], torch.sin(values[1] * 9), _mask())
    losses, _ = user_policy_loss(name, code, inputs)
    _check_gradient(f"{LOSS.title} {name}", losses, logprobs)
    halves = [
        user_policy_loss(name, code, PolicyLossInputs(
            logprobs[half], inputs.old_logprobs[half], inputs.rollout_logprobs[half], inputs.advantages[half],
            inputs.mask[half],
        ))[0]
        for half in (slice(0, 2), slice(2, None))
    ]  # fmt: skip
    _check_split(f"{LOSS.title} {name}", losses, torch.cat(halves))


def _try_kl(name: str, code: UserCode) -> None:
    values = _trial_values()
    logprobs = values[0].requires_grad_()
    kl = kl_estimate(name, code, logprobs, values[1])
    _check_gradient(f"{KL.title} {name}", kl, logprobs)
    halves = [
        kl_estimate(name, code, logprobs[:2], values[1][:2]),
        kl_estimate(name, code, logprobs[2:], values[1][2:]),
    ]
    _check_split(f"{KL.title} {name}", kl, torch.cat(halves))


def _try_aggregation(name: str, code: UserCode) -> None:
    losses, mask = _trial_values()[0].requires_grad_(), _mask()

    def share(rows: slice) -> torch.Tensor:
        sample_tokens, prompt_tokens = mask.sum(dim=1), mask.sum().expand(len(mask))  # one prompt
        inputs = AggregationInputs(
            losses[rows], mask[rows], float(mask.sum()), 4.0, 8, sample_tokens[rows], 1.0, prompt_tokens[rows]
        )
        return user_aggregation(name, code, inputs)

    whole = share(slice(None))
    _check_gradient(f"{AGGREGATION.title} {name}", whole, losses)
    _check_split(f"{AGGREGATION.title} {name}", whole, share(slice(0, 1)) + share(slice(1, None)))


def _check_gradient(what: str, result: torch.Tensor, leaf: torch.Tensor) -> None:
    if not result.requires_grad:
        raise ValueError(f"{what} has no gradient; do not detach or convert its inputs")
    (gradient,) = torch.autograd.grad(result.sum(), leaf, retain_graph=True)
    if not (torch.isfinite(gradient).all() and torch.isfinite(result).all()):
        raise ValueError(f"{what} is not finite, or its gradient is not")


def _check_split(what: str, whole: torch.Tensor, parts: torch.Tensor) -> None:
    if not torch.allclose(whole, parts, rtol=_CLOSE, atol=_CLOSE):
        raise ValueError(
            f"{what} gives other results when the rows are split, so the gradient would depend on the "
            "number of ranks; compute each row alone, and divide only by counts that the inputs have"
        )


def _try_rollout(rollout: UserRollout, tokenizer: Any) -> None:
    async def generate(
        ids: list[int], seed: int, sampling: Sampling, most: int, *, stop: Sequence[str]
    ) -> Generation:
        count = min(most, 3)
        return Generation(
            [ids[-1]] * count, np.full(count, -1.0, np.float32), np.zeros(count, np.int32), "stop"
        )

    asyncio.run(rollout.sample(_trial_prompt(0), 0, 1, Sampling(max_new_tokens=64), generate, tokenizer))


_TRIALS: dict[Kind, Callable[[str, UserCode], None]] = {
    ADVANTAGE: _try_advantage, LOSS: _try_loss, KL: _try_kl, AGGREGATION: _try_aggregation,
}  # fmt: skip


def _trial_values() -> list[torch.Tensor]:
    """Return three [4, 6] tensors of log-probs, nats, slightly different."""
    numbers = torch.arange(_ROWS * _TOKENS, dtype=torch.float32).view(_ROWS, _TOKENS)
    return [-0.5 - torch.sin(numbers + shift).abs() for shift in (0.0, 0.05, 0.1)]


def _mask() -> torch.Tensor:
    return torch.arange(_TOKENS) < torch.tensor([[6], [3], [5], [1]])


def _trial_prompt(number: int) -> Prompt:
    return Prompt(f"p{number}", np.array([1, 2, 3], np.int32), "3", "made", "1+2=")


def _trial_groups() -> list[Group]:
    rewards = np.array([1.0, 0.0], np.float32)
    rollouts = tuple(
        Rollout(
            "p0", i, np.full(i + 1, 3, np.int32), np.full(i + 1, -1.0, np.float32), "stop", "3",
            np.zeros(i + 1, np.int32), temperature=1.0, max_new_tokens=8,
        )
        for i in range(2)
    )  # fmt: skip
    return [Group(_trial_prompt(0), rollouts, rewards, {"math": rewards}, ("correct", "wrong"))]
