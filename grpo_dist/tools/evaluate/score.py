"""`grpo-dist score`: evaluates existing completions, without engine, GPU or Ray.

completions --> grader processes, as in a run --> scored groups --> verdicts --> the table of `eval`
                                                    |--> values of each reward, agreement of graders
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape

from grpo_dist.config import Config, RewardsConfig
from grpo_dist.config.files import apply_overrides, read_config, validated
from grpo_dist.errors import UserError, as_user_errors, refuse
from grpo_dist.evaluation.result import JudgedProblem, measure
from grpo_dist.rewards.checks import check_rewards, column_problems
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.pool import GraderPool, processes_for
from grpo_dist.rewards.registry import user_rewards
from grpo_dist.rewards.scorer import scorers_by_source
from grpo_dist.rewards.thought import infer_thoughts
from grpo_dist.runs.models import load_tokenizer, resolve_model
from grpo_dist.runs.run_directory import check_writable
from grpo_dist.runtime.files import check_replaceable, write_text
from grpo_dist.runtime.hardware import available_cpus
from grpo_dist.runtime.stage_log import note, stage
from grpo_dist.runtime.tables import print_lines, print_rows, wide_console
from grpo_dist.tools.evaluate.completions import TABLE, Columns, Completions, read_completions
from grpo_dist.tools.evaluate.result import make_verdict, print_measured
from grpo_dist.types import Group, Thought

# Rewards that need policy tokens, not only text.
_OF_TOKENS = ("overlong", "cosine_length", "relative_length", "repetition")
# Begin keys of a configuration whose secrets are not read.
_UNREAD = (
    "algorithm.", "data.", "demonstrations.", "distillation.", "environments.", "policy.", "rollout.", "sft.",
    "tracking.",
)  # fmt: skip
_NO_MODEL = "no/model"  # model path of a configuration made for --reward
_SHOWN = 5  # disagreements to print
_TAIL = 160  # characters to print from the end of a completion


@dataclass(frozen=True)
class Scored:
    """All scores.

    Attributes:
        groups: the scored group of each problem.
        seconds: scoring time per problem.
        wall_s: wall-clock time, without process start.
        failures: counts of error messages by reward.
    """

    completions: list[Completions]
    groups: list[Group]
    seconds: list[float]
    wall_s: float
    processes: int
    failures: Mapping[str, Counter[str]]

    @property
    def rewards(self) -> np.ndarray:
        """Total reward of each completion: float64 [N], NaN for unscored."""
        return np.concatenate([group.rewards for group in self.groups]).astype(float)

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """Each reward's values per completion: float64 [N], NaN if unscored or not used by the source."""
        names = dict.fromkeys(name for group in self.groups for name in group.reward_parts)

        def part(name: str, group: Group) -> np.ndarray:
            return group.reward_parts.get(name, np.full(len(group.rewards), np.nan))

        return {
            name: np.concatenate([part(name, group) for group in self.groups]).astype(float) for name in names
        }

    def map_completions(self, value: Callable[[Group], Any]) -> np.ndarray:
        """Repeat each group's value for its completions: [N]."""
        return np.array([value(group) for group in self.groups for _ in group.rollouts])


def score(
    path: Path, config: Config, say: Callable[[str], None], *, columns: Columns, output: Path | None
) -> Scored:
    """Grade the completions in ``path``; print and write the scores.

    Raises UserError for an invalid row, reward or setting, before anything is graded.
    """
    target = output or Path(f"{path.stem}.scored.jsonl")
    if target.resolve() == path.resolve():
        raise UserError(f"--output {target} is the file of completions; name another")
    with stage("completions", quiet=True):
        completions = read_completions(path, columns)
    processes = config.rewards.num_workers * config.rewards.processes_per_worker
    processes = min(processes, processes_for(len(completions)))
    with ExitStack() as stack:
        with as_user_errors(), stage("rewards and tokenizer", quiet=True):
            _check_sources(config.rewards, completions)
            _check_output(target)
            pool = stack.enter_context(GraderPool.from_config(config.rewards, processes))
            check_rewards(config.rewards, max_new_tokens=config.sampling.shortest, pool=pool)
            _check_columns(config.rewards, completions, path, pool)
            tokenizer = _tokenizer(config, say)
        if config.rewards.models:
            names = ", ".join(model.name for model in config.rewards.models)
            say(f"warning: reward models are not run ({names}): the total excludes them")
        with stage("scoring", quiet=True):
            longest = config.sampling.longest
            scored = score_completions(
                completions, config.rewards, tokenizer, pool, max_new_tokens=longest, processes=processes
            )
        with stage("report", quiet=True):
            _report(scored, config, pool, columns.label, target)
    return scored


def configuration(
    path: Path, rewards: Sequence[str], config_file: str | None, overrides: Sequence[str]
) -> Config:
    """Build the configuration with ``rewards``, the rewards of ``config_file``, or else the math grader.

    Raises UserError for --reward together with a file, and for invalid settings.
    """
    if rewards and config_file:
        raise UserError(f"--reward and {config_file}: both give rewards; give one of the two")
    if config_file:
        path = Path(config_file)
        tree = apply_overrides(read_config(path), overrides, path)
        return validated(tree, config_file, Config, unread=_UNREAD)
    functions = [{"function": name} for name in rewards or ["math"]]
    tree = OmegaConf.create(
        {
            "model": {"path": _NO_MODEL},
            # Episode rewards need an environment; the file's episodes are already finished.
            "data": {
                "train": [{"path": str(path)}],
                "environment": "calculator" if "environment" in rewards else "none",
            },
            "rewards": {"functions": functions, "processes_per_worker": available_cpus()},
        }
    )
    return validated(apply_overrides(tree, overrides, path), "score", Config)


def score_completions(
    completions: list[Completions],
    rewards: RewardsConfig,
    tokenizer: Any,
    pool: GraderPool,
    *,
    max_new_tokens: int,
    processes: int,
) -> Scored:
    """Score in order, ``processes`` problems at once, and as many more as may wait for servers.

    ``tokenizer``: the policy's; None if no reward needs tokens.
    """
    used = {c.source if c.source in rewards.by_source else "" for c in completions}
    # Reward models are not run here.
    variants = {source: rewards.select_source(source).model_copy(update={"models": ()}) for source in used}
    with ExitStack() as stack:
        scorers = scorers_by_source(variants, pool, workers=1)
        for scorer in scorers.values():
            stack.callback(scorer.close)
        pool.grade([("\\boxed{1}", "1")] * processes)  # starts the processes before the time measurement

        def one(item: Completions, thought: Thought) -> tuple[Group, float]:
            rollouts = item.rollouts
            if tokenizer is not None:
                ids = tokenizer([r.text for r in rollouts], add_special_tokens=False)["input_ids"]
                rollouts = tuple(
                    replace(r, completion_ids=np.asarray(sample_ids, np.int32))
                    for r, sample_ids in zip(rollouts, ids, strict=True)
                )
            prompt = replace(item.prompt, thought=thought)
            group = CompletionGroup.from_rollouts(
                prompt, rollouts, max_new_tokens=max_new_tokens, settings=rewards
            )
            begin = time.perf_counter()
            scores = scorers[item.source if item.source in scorers else ""].score(group)
            seconds = time.perf_counter() - begin
            return Group(prompt, rollouts, scores.rewards, scores.parts, tuple(scores.outcomes)), seconds

        begin, scored = time.perf_counter(), []
        waiting = sum(scorer.max_concurrency for scorer in scorers.values())
        with ThreadPoolExecutor(processes + waiting) as threads:
            for result in threads.map(one, completions, _thoughts(completions, rewards)):
                scored.append(result)
                note(f"{len(scored)} of {len(completions)} problems")
        wall_s = time.perf_counter() - begin
        failures: dict[str, Counter[str]] = {}
        for scorer in scorers.values():
            for name, messages in scorer.failures.items():
                failures.setdefault(name, Counter()).update(messages)
    groups, seconds = zip(*scored, strict=True)
    return Scored(completions, list(groups), list(seconds), wall_s, processes, failures)


def _thoughts(completions: Sequence[Completions], rewards: RewardsConfig) -> list[Thought]:
    """Return the thought of each prompt, inferred from the completions of its source where it is unknown."""
    unknown: dict[str, list[int]] = {}
    for number, item in enumerate(completions):
        if item.thought is None:
            unknown.setdefault(item.source, []).append(number)
    inferred: dict[int, Thought] = {}
    for numbers in unknown.values():
        groups = [completions[number].rollouts for number in numbers]
        inferred.update(zip(numbers, infer_thoughts(groups, rewards), strict=True))
    return [item.thought or inferred[number] for number, item in enumerate(completions)]


def _check_output(target: Path) -> None:
    """Raise UserError unless ``target`` can be written; an existing file is replaced."""
    try:
        check_writable(target.absolute().parent)
    except ValueError as error:
        raise UserError(f"--output {target} cannot be written; name another file") from error
    if target.is_dir():
        raise UserError(f"--output {target} is a directory; name a file")
    check_replaceable(target)


def _check_sources(rewards: RewardsConfig, completions: Sequence[Completions]) -> None:
    """Raise ValueError if a row has only rewards that need GPUs: reward models are not run here."""
    for item in completions if rewards.by_source else ():
        if "source" not in item.rows[0]:
            raise ValueError(
                f"{item.location}: no column `source`, which selects the rewards of the row "
                "(rewards.by_source); rewards.by_source={} uses rewards.functions for all rows"
            )
    for source in sorted({item.source for item in completions}):
        settings = rewards.select_source(source)
        models = [model.name for model in settings.models]
        if not settings.functions:
            key = f"rewards.by_source.{source}" if source in rewards.by_source else "rewards"
            why = f"reward models ({', '.join(models)}) are not run" if models else "nothing else scores rows"
            of_rows = f" of source {source!r}" if rewards.by_source else ""
            raise ValueError(f"{key}.functions is empty, and {why}{of_rows}")
        for reward in settings.functions:
            if reward.gate in models:
                raise ValueError(
                    f"reward {reward.label}: its gate {reward.gate} is a reward model, "
                    "which is not run; remove the gate, or the reward"
                )


def _check_columns(
    rewards: RewardsConfig, completions: Sequence[Completions], path: Path, pool: GraderPool
) -> None:
    """Raise ValueError if a row lacks a reward's column, or the reward cannot read it."""
    remedy = (
        "a table of samples has no further columns of the data, so score a JSON Lines file that has it"
        if path.suffix == TABLE
        else "add it to the file"
    )
    by_source: dict[str, list[Completions]] = {}
    for item in completions:
        by_source.setdefault(item.source, []).append(item)
    for items in by_source.values():
        refuse(column_problems(rewards, items, remedy))
    if user_rewards(rewards):
        for items in by_source.values():
            refuse(column_problems(rewards, items, remedy, pool=pool))


def _tokenizer(config: Config, say: Callable[[str], None]) -> Any:
    """Return the policy's tokenizer if a reward needs tokens, else None."""
    token_rewards = [r.function for r in config.rewards.all_functions if r.function in _OF_TOKENS]
    if not token_rewards:
        return None
    if config.model.path == _NO_MODEL:
        raise ValueError(
            f"reward {token_rewards[0]} counts tokens; set the model of the tokenizer, "
            "e.g. model.path=Qwen/Qwen2.5-0.5B-Instruct"
        )
    model_dir = resolve_model(config.model, config.sft, config.seed, say, train_first=False, trains=False)
    return load_tokenizer(model_dir, config.model.trust_remote_code)


def _report(scored: Scored, config: Config, pool: GraderPool, label: str | None, target: Path) -> None:
    """Print tables, and write a row with its `score` for every completion."""
    console, parts = wide_console(), scored.parts
    if any(outcome for group in scored.groups for outcome in group.outcomes):
        verdicts = [make_verdict(group, config.rewards, pool) for group in scored.groups]
        judged = [
            JudgedProblem.from_verdict(g.prompt.source or "all", g.prompt, {}, verdict, config.evaluation.k)
            for g, verdict in zip(scored.groups, verdicts, strict=True)
        ]
        print_measured(console, target.name, list(measure(judged)))
    _print_rewards(console, scored, parts)
    graders = {name: part for name, part in parts.items() if is_grader(part)}
    if label is not None:
        labels = np.array([value for item in scored.completions for value in item.labels])
        graders[label if label not in parts else f"{label} (label)"] = labels
    differ = np.zeros(len(scored.rewards), bool)
    if len(graders) > 1:
        print_agreements(console, graders)
        if others := [name for name in parts if name not in graders]:
            names = ", ".join(others)
            console.print(f"not compared, as their values are not all 0 or 1: {names}", markup=False)
        differ = disagreements(graders)
    lines, number, num_shown = [], 0, 0
    for item, group, seconds in zip(scored.completions, scored.groups, scored.seconds, strict=True):
        for i, (row, location) in enumerate(zip(item.rows, item.locations, strict=True)):
            values = {
                "reward": _plain(group.rewards[i]),
                "parts": {name: _plain(part[i]) for name, part in group.reward_parts.items()},
                "outcome": group.outcomes[i],
                "seconds": round(seconds, 6),
            }
            if differ[number]:
                values["graders_disagree"] = True
                if (num_shown := num_shown + 1) <= _SHOWN:
                    opinions = ", ".join(f"{name} {_verdict(v[number])}" for name, v in graders.items())
                    text = str(row["completion"])
                    tail = ("..." if len(text) > _TAIL else "") + text[-_TAIL:]
                    print_lines(
                        console, [f"{location}: {opinions}; answer {group.prompt.answer!r}: {tail!r}"]
                    )
            lines.append(json.dumps({**row, "score": values}, ensure_ascii=False) + "\n")
            number += 1
    write_text(target, "".join(lines))
    if len(graders) > 1:
        print_lines(console, [f"disagreements: {int(differ.sum())}, with `graders_disagree` in {target}"])
    print_lines(console, [f"scores: {target}"])


def _verdict(value: float) -> str:
    return "unscored" if math.isnan(value) else f"{value:g}"


def _plain(value: np.floating) -> float | None:
    """Convert a value for JSON; a float32 0.1 becomes 0.1, the shortest text that reads back as it."""
    return None if np.isnan(value) else float(str(value))


def _print_rewards(console: Console, scored: Scored, parts: Mapping[str, np.ndarray]) -> None:
    """Print the total, also by source, and each reward; math grader outcomes, reasons for unscored
    completions, and times.
    """
    totals, of_source = {"total": scored.rewards}, scored.map_completions(lambda group: group.prompt.source)
    if len(sources := dict.fromkeys(of_source)) > 1:
        totals |= {f"total of {s or 'other sources'}": totals["total"][of_source == s] for s in sources}
    having = scored.map_completions(lambda group: set(group.reward_parts))
    has = {name: np.array([name in names for names in having]) for name in parts}
    values = totals | {name: part[has[name]] for name, part in parts.items()}
    columns = ("reward", "scored", "unscored", "mean", "std", "min", "p50", "max")
    rows = []
    for name, scores in values.items():
        scored_values = scores[~np.isnan(scores)]
        statistics = (np.mean, np.std, np.min, np.median, np.max) if len(scored_values) else ()
        cells = [f"{statistic(scored_values):.3f}" for statistic in statistics] or ["–"] * 5
        unscored = len(scores) - len(scored_values)
        rows.append([escape(name), str(len(scored_values)), str(unscored or "–"), *cells])
    print_rows(console, "rewards", columns, rows)
    if outcomes := Counter(o for group in scored.groups for o in group.outcomes if o):
        console.print("math outcomes: " + ", ".join(f"{o} {n}" for o, n in outcomes.most_common()))
    locations = [where for item in scored.completions for where in item.locations]
    for name, part in parts.items():
        if len(missing := np.flatnonzero(np.isnan(part) & has[name])):
            errors = scored.failures.get(name, Counter()).most_common()
            first = ", ".join(locations[i] for i in missing[:3])
            print_lines(console, [f"unscored: {name}: {len(missing)}, e.g. {first}"])
            print_lines(console, (f"    {count} times: {text}" for text, count in errors))
    slowest = sorted(zip(scored.seconds, scored.completions, strict=True), key=lambda pair: -pair[0])[:3]
    count, median = len(locations), 1e3 * float(np.median(scored.seconds))
    print_lines(
        console,
        [
            f"{count} completions in {scored.wall_s:.1f} s, {count / scored.wall_s:,.0f} a second in "
            f"{scored.processes} processes; median of a row {median:.1f} ms; slowest: "
            + ", ".join(f"{item.location} {1e3 * seconds:.0f} ms" for seconds, item in slowest)
        ],
    )


def is_grader(values: np.ndarray) -> bool:
    """Return True if all scored values are 0 or 1 and at least one is scored."""
    scored = values[~np.isnan(values)]
    return bool(len(scored)) and bool(np.isin(scored, (0.0, 1.0)).all())


def disagreements(graders: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return bool [N]: whether graders disagree on the completion."""
    values = np.array(list(graders.values()))
    return (values == 1).any(axis=0) & (values == 0).any(axis=0)


def agreement(first: np.ndarray, second: np.ndarray) -> tuple[list[int], int, float]:
    """Count completions that both graders, only the first, only the second, and neither call correct, and
    those that at least one did not score. Also return the agreement on scored completions, NaN if none.

        20 both, 5 only first, 10 only second, 15 neither: 0.7
    """
    counts = [int(((first == a) & (second == b)).sum()) for a, b in ((1, 1), (1, 0), (0, 1), (0, 0))]
    scored = sum(counts)
    return counts, len(first) - scored, (counts[0] + counts[3]) / scored if scored else math.nan


def print_agreements(console: Console, graders: Mapping[str, np.ndarray]) -> None:
    """Compare every two of ``graders``: float [N] each, NaN for unscored."""
    columns = ("A", "B", "both", "only A", "only B", "neither", "unscored", "agreement")
    rows = []
    for a, b in combinations(graders, 2):
        counts, unscored, share = agreement(graders[a], graders[b])
        cells = [*map(str, counts), str(unscored or "–"), "–" if math.isnan(share) else f"{share:.2%}"]
        rows.append([escape(a), escape(b), *cells])
    print_rows(console, "graders: completions that A and B call right", columns, rows)
