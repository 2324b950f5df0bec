"""Checks rewards before a run: unusable settings, rewards that cannot be combined, columns of the data that
rewards read, and gold answers that are missing or cannot be parsed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, Protocol

from grpo_dist.config import RewardsConfig
from grpo_dist.config.algorithm import ESTIMATOR_TRAITS
from grpo_dist.config.rewards import FunctionConfig
from grpo_dist.rewards.builtin import Builtin
from grpo_dist.rewards.group import named_columns
from grpo_dist.rewards.pool import GraderPool, processes_for
from grpo_dist.rewards.registry import REWARDS, UserFunction, check_name, make


def check_rewards(settings: RewardsConfig, *, max_new_tokens: int, pool: GraderPool | None = None) -> None:
    """Raise ValueError for the first reward that cannot be used; see `reward_problems`."""
    for problem in reward_problems(settings, max_new_tokens=max_new_tokens, pool=pool):
        raise ValueError(problem)


def reward_problems(
    settings: RewardsConfig, *, max_new_tokens: int, pool: GraderPool | None = None
) -> Iterator[str]:
    """Yield a message for every reward that cannot be used.

    Loads user functions in a process of ``pool`` (None: of a temporary pool), and asks each judge one
    question.
    """
    custom, checked = list[tuple[str, FunctionConfig]](), list[tuple[str, Mapping[str, Any]]]()
    for source, rewards_of_source in settings.variants.items():
        for spec in rewards_of_source.functions:
            if (spec.label, spec.kwargs) in checked:
                continue
            checked.append((spec.label, spec.kwargs))
            if spec.function not in REWARDS:
                custom.append((source, spec))
                continue
            try:
                make(spec).check(max_new_tokens=max_new_tokens)
            except ValueError as error:
                yield _describe(settings, source, spec, error)
    if not custom:
        return
    with nullcontext(pool) if pool else GraderPool.from_config(settings, 1) as loading:
        for source, function in custom:
            try:
                UserFunction(function, loading)
            except ValueError as error:
                yield _describe(settings, source, function, error)


def name_problems(settings: RewardsConfig) -> Iterator[str]:
    """Yield a message for every reward that has an unknown name, or a kind that the name lacks. Loads
    nothing.
    """
    for source, rewards_of_source in settings.variants.items():
        for function in rewards_of_source.functions:
            try:
                check_name(function)
            except ValueError as error:
                yield _describe(settings, source, function, error)


def _describe(settings: RewardsConfig, source: str, function: FunctionConfig, error: ValueError) -> str:
    """Return the message of ``error``, with the key, and the name that errors of built-in rewards lack."""
    label = f" {function.label}" if function.function in REWARDS else ""
    return f"{settings.functions_key(source)}{label}: {error}"


def graded_problems(settings: RewardsConfig, advantage: str) -> Iterator[str]:
    """Yield a message for every built-in reward with scores other than 0 and 1, if the estimator needs those.
    Scores of user functions and servers are unknown.
    """
    if advantage not in ESTIMATOR_TRAITS or not ESTIMATOR_TRAITS[advantage].only_right_and_wrong:
        return
    builtin = [r for r in settings.all_functions if r.weight and r.function in REWARDS]
    for reward in {r.function: r for r in reversed(builtin)}.values():
        with suppress(ValueError):  # wrong kwargs are reported by `reward_problems`
            if make(reward).is_graded:
                yield (
                    f"`algorithm.advantage` = {advantage} needs a reward of 0 and 1, but `{reward.function}` "
                    "has other values; set its `weight` to 0, or use another advantage"
                )


def combination_problems(settings: RewardsConfig) -> Iterator[str]:
    """Yield a message for every length reward that asks the math grader beside a reward that tests code.

    The math grader finds no gold answer in code, so it would grade every solution as wrong, also in
    evaluations. With `math` or `judge` among the rewards, its verdicts are intended.
    """
    for source, rewards_of_source in settings.variants.items():
        built_in = [spec for spec in rewards_of_source.functions if spec.function in REWARDS]
        tests = next((s.label for s in built_in if not REWARDS[s.function].knows_right_answers), None)
        if tests is None or {"math", "judge"} & {spec.function for spec in built_in}:
            continue
        key = settings.functions_key(source)
        for spec in built_in:
            if REWARDS[spec.function].asks_math_grader:
                yield (
                    f"{key} {spec.label} asks the math grader, which grades all code of `{tests}` as wrong, "
                    f"also in evaluations; expected a length reward that does not, e.g. `overlong` with "
                    f"`gate: {tests}`"
                )


class HasColumns(Protocol):
    """A row of a data source; ``location`` is for messages: ``code.jsonl:17``."""

    @property
    def source(self) -> str: ...

    @property
    def location(self) -> str: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


def column_problems(
    settings: RewardsConfig,
    rows: Sequence[HasColumns],
    remedy: str,
    available: Callable[[], Iterable[str]] | None = None,
    *,
    pool: GraderPool | None = None,
) -> Iterator[str]:
    """Yield a message for every column that a reward reads and a row lacks, or has in an unreadable form.

    Args:
        rows: rows of one source.
        remedy: how to add a column, for messages: ``add it to `data.train.0.columns` ``.
        available: returns all columns of the source, of which rows may keep some; None: rows keep all.
        pool: loads users' functions, and only these are checked; None: only built-in rewards are checked.
    """
    source = rows[0].source if rows else ""
    for function in settings.select_source(source).functions if rows else ():
        if (function.function in REWARDS) == (pool is not None):
            continue
        try:
            reward = UserFunction(function, pool) if pool else make(function)
        except ValueError as error:
            yield _describe(settings, source, function, error)
            continue
        missing = dict(_missing(function.label, reward.data_columns, rows, remedy, available))
        for column, problem in missing.items():
            here = _PEER_NAMES.get(column) if pool else None
            yield problem + (f". What other trainers call `{column}` is `{here}` here" if here else "")
        if isinstance(reward, Builtin) and reward.data_columns and not missing:
            yield from islice(_unreadable_rows(function.label, reward, rows), 1)


def _unreadable_rows(name: str, reward: Builtin, rows: Sequence[HasColumns]) -> Iterator[str]:
    for row in rows:
        try:
            reward.check_row(named_columns(row.columns))
        except ValueError as error:
            yield f"reward {name}: {row.location}: {error}"


def asked_columns(settings: RewardsConfig) -> frozenset[str]:
    """Return the columns that users' functions name as parameters; rows keep these if they have them.

    Loads the functions. A function that cannot be loaded is skipped: `reward_problems` reports it.
    """
    specs = {function.function: function for function in settings.all_functions}
    names: set[str] = set()
    if custom := [spec for function, spec in specs.items() if function not in REWARDS]:
        with GraderPool.from_config(settings, 1) as pool:
            for spec in custom:
                with suppress(ValueError):
                    names |= UserFunction(spec, pool).asked_columns
    return frozenset(names)


# Arguments of reward functions of TRL, verl and OpenRLHF.
_PEER_NAMES = {
    "prompt": "problem", "prompts": "problem", "ground_truth": "answer", "solution": "answer",
    "label": "answer", "labels": "answer", "solution_str": "completion", "response": "completion",
    "responses": "completions", "queries": "completions", "completion_ids": "token_ids",
    "data_source": "source",
}  # fmt: skip


def _missing(
    name: str,
    columns: Sequence[str],
    rows: Sequence[HasColumns],
    remedy: str,
    available: Callable[[], Iterable[str]] | None,
) -> Iterator[tuple[str, str]]:
    """Yield each column that one of ``rows`` lacks, and the message about it."""
    data_columns = [column for column in columns if column != "problem"]
    with_columns = [(row, named_columns(row.columns)) for row in rows] if data_columns else []
    for column in data_columns:
        lacking = next((row for row, has in with_columns if column not in has), None)
        if lacking is not None:
            has = {"problem", *lacking.columns}
            with suppress(ValueError):  # the source is readable only in the run
                has = set(available()) if available else has
            if column in has:
                what = f"which {lacking.location} has, and the configuration does not pass on"
            else:
                what = f"but {lacking.location} has only {', '.join(sorted(has))}"
            other = f"give source {lacking.source} other rewards in `rewards.by_source`"
            yield (
                column,
                f"reward {name} reads column `{column}`, {what}: {remedy}, correct the kwargs of the reward, "
                f"or {other if lacking.source else 'choose another reward'}",
            )


_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")  # always parsable; most data sets hold nothing else

_EXAMINED = 1000  # enough to detect a wrong column, in seconds even for hard formulas

_NO_ANSWERS = frozenset(  # placeholders for missing answers in public data sets; only letters count
    re.findall(
        r"\w+",
        """
    proof prove proven proved qed toprove proofomitted prooffound seeproof theproof proofrequired solution
    seesolution seethesolution seesolutionabove seeabove seebelow seetext seeproblem asabove seeexplanation
    notfound answernotfound notavailable notprovided answernotprovided notgiven noanswer noansweravailable
    noanswerfound noanswerprovided noanswergiven answernotavailable missing missinganswer unknown unanswered
    unsolved todo tbd tba none null nan nil omitted placeholder
        """,
    )
)

_NAMED_ROWS = 3  # rows that a message names per answer


def is_no_answer(gold: str) -> bool:
    """Return whether a gold is a placeholder for a missing answer: ``proof``, ``N/A``, ``-``."""
    text = re.sub(r"\\(?:boxed|text[a-z]*|mathrm|mbox)(?![A-Za-z])", "", gold)
    if re.fullmatch(r"[\s\-–—?_.…*{}$]*|\W*n\s*[/.]\s*a\W*", text, re.IGNORECASE):
        return True
    return not re.search(r"\d", text) and re.sub(r"[\W_]", "", text).lower() in _NO_ANSWERS


def describe_no_answers(golds: Iterable[tuple[str, str]]) -> str:
    """Describe golds that are no answers, with their counts and rows; "" without any.

    ``golds``: pairs of a row's file and number, and its gold.

        'proof' 2 times (train.jsonl:3, train.jsonl:7), 'N/A' once (train.jsonl:9)
    """
    places: dict[str, list[str]] = defaultdict(list)
    for location, gold in golds:
        if is_no_answer(gold):
            places[gold.strip()].append(location)
    parts = []
    for gold, rows in sorted(places.items(), key=lambda item: -len(item[1])):
        times = "once" if len(rows) == 1 else f"{len(rows)} times"
        parts.append(
            f"{gold!r} {times} ({', '.join(rows[:_NAMED_ROWS])}{', ...' if len(rows) > _NAMED_ROWS else ''})"
        )
    return ", ".join(parts)


def find_unreadable(golds: Sequence[str], settings: RewardsConfig) -> tuple[list[int], int]:
    """Find gold answers that can only be compared as text. Returns their indices, and how many were examined.

    Examines all plain numbers and the first thousand other answers, in grader processes with a deadline per
    answer, because some texts hang a parser.
    """
    formula_golds = {gold for gold in set(golds) if not _NUMBER.fullmatch(gold)}
    formulas = [i for i, gold in enumerate(golds) if gold in formula_golds]
    sample = formulas[:_EXAMINED]
    examined = len(golds) - len(formulas) + len(sample)
    if not sample:
        return [], examined
    with GraderPool.from_config(settings, processes_for(len(sample))) as pool:
        answers = [{"answer": golds[i]} for i in sample]
        readable = pool.call("grpo_dist.rewards.math:gold_is_parsable", answers)
    return [i for i, value in zip(sample, readable, strict=True) if value != 1.0], examined
