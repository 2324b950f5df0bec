"""Checks of rewards before a run: settings that cannot be used, rewards that do not go together, columns of
the data that rewards read by name, and gold answers that are none or cannot be parsed.
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
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import REWARDS, UserFunction, make
from grpo_dist.runtime.hardware import available_cpus


def check_rewards(settings: RewardsConfig, *, max_new_tokens: int, pool: GraderPool | None = None) -> None:
    """Raise ValueError for the first reward that cannot be used; see `reward_problems`."""
    for problem in reward_problems(settings, max_new_tokens=max_new_tokens, pool=pool):
        raise ValueError(problem)


def reward_problems(
    settings: RewardsConfig, *, max_new_tokens: int, pool: GraderPool | None = None
) -> Iterator[str]:
    """Yield a message for every reward that cannot be used.

    Loads user functions in a process of ``pool``, None: of a pool of its own, and asks each judge one
    question.
    """
    custom, seen = list[tuple[str, FunctionConfig]](), list[tuple[str, Mapping[str, Any]]]()
    for source, rewards_of_source in settings.variants.items():
        for spec in rewards_of_source.functions:
            if (spec.label, spec.kwargs) in seen:
                continue
            seen.append((spec.label, spec.kwargs))
            if spec.function not in REWARDS:
                custom.append((source, spec))
                continue
            try:
                make(spec).check(max_new_tokens=max_new_tokens)
            except ValueError as error:
                yield f"{settings.functions_key(source)} {spec.label}: {error}"
    if not custom:
        return
    with nullcontext(pool) if pool else GraderPool.from_config(settings, 1) as loading:
        for source, function in custom:
            try:
                UserFunction(function, loading)
            except ValueError as error:
                yield f"{settings.functions_key(source)}: {error}"


def graded_problems(settings: RewardsConfig, advantage: str) -> Iterator[str]:
    """Yield a message for every built-in reward with other scores than 0 and 1, if the estimator needs those.
    Of user functions and servers nothing is known.
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
    """Yield a message for every source that tests code, where a length reward asks the math grader.

    The math grader finds no gold answer in code: it would call every solution wrong, for the length reward as
    in evaluations. With `math` or `judge` among the rewards, its verdicts are asked for.
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
                    f"{key} {spec.label} takes right and wrong from the math grader, which calls all code "
                    f"that `{tests}` runs wrong, also in evaluations; expected a length reward that does "
                    f"not, e.g. `overlong` with `gate: {tests}`"
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
    """Yield a message for every column that a reward reads and one of ``rows`` lacks, or has in another form.

    Args:
        rows: of one source.
        remedy: how a row gets a column: ``add it to `data.train.0.columns` ``.
        available: returns all columns that the source has, of which rows may keep some; None: they keep all.
        pool: where the functions of users are loaded, and only they are looked at; None: only the built-in
            rewards are.
    """
    source = rows[0].source if rows else ""
    for function in settings.select_source(source).functions if rows else ():
        if (function.function in REWARDS) == (pool is not None):
            continue
        try:
            reward = UserFunction(function, pool) if pool else make(function)
        except ValueError as error:
            key, label = settings.functions_key(source), "" if pool else f" {function.label}"
            yield f"{key}{label}: {error}"
            continue
        missing = dict(_missing(function.label, reward.data_columns, rows, remedy, available))
        for column, problem in missing.items():
            here = _NAMES_OF_PEERS.get(column) if pool else None
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
    """Return the columns that users' functions name as parameters: rows keep them, if they have them.

    Loads the functions. One that cannot be loaded asks for nothing here: `reward_problems` reports it.
    """
    specs = {function.function: function for function in settings.all_functions}
    asked: set[str] = set()
    if custom := [spec for function, spec in specs.items() if function not in REWARDS]:
        with GraderPool.from_config(settings, 1) as pool:
            for spec in custom:
                with suppress(ValueError):
                    asked |= UserFunction(spec, pool).asked_columns
    return frozenset(asked)


# Arguments of reward functions of TRL, verl and OpenRLHF.
_NAMES_OF_PEERS = {
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
    wanted = [column for column in columns if column != "problem"]
    with_columns = [(row, named_columns(row.columns)) for row in rows] if wanted else []
    for column in wanted:
        lacking = next((row for row, has in with_columns if column not in has), None)
        if lacking is not None:
            has = {"problem", *lacking.columns}
            with suppress(ValueError):  # of a source that only the run can read
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

_LOOKED_AT = 1000  # enough to detect a wrong column, in seconds even for hard formulas

_NO_ANSWERS = frozenset(  # what public sets write where a problem has no final answer; letters alone count
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

_NAMED_ROWS = 3  # rows that a message names of each such answer


def is_no_answer(gold: str) -> bool:
    """Return whether a gold says that there is none: ``proof``, ``see solution``, ``N/A``, ``-``."""
    text = re.sub(r"\\(?:boxed|text[a-z]*|mathrm|mbox)(?![A-Za-z])", "", gold)
    if re.fullmatch(r"[\s\-–—?_.…*{}$]*|\W*n\s*[/.]\s*a\W*", text, re.IGNORECASE):
        return True
    return not re.search(r"\d", text) and re.sub(r"[\W_]", "", text).lower() in _NO_ANSWERS


def describe_no_answers(golds: Iterable[tuple[str, str]]) -> str:
    """Return what golds that are no answers are, how often, and in which rows; "" without any.

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

    Examines all plain numbers and the first thousand other answers, in grader processes with the deadline of
    an answer, because some texts hang a parser.
    """
    formula_golds = {gold for gold in set(golds) if not _NUMBER.fullmatch(gold)}
    formulas = [i for i, gold in enumerate(golds) if gold in formula_golds]
    asked = formulas[:_LOOKED_AT]
    looked_at = len(golds) - len(formulas) + len(asked)
    if not asked:
        return [], looked_at
    with GraderPool.from_config(settings, min(available_cpus(), len(asked))) as pool:
        readable = pool.call("grpo_dist.rewards.math:gold_is_parsable", [{"answer": golds[i]} for i in asked])
    return [i for i, value in zip(asked, readable, strict=True) if value != 1.0], looked_at
