"""Run an evaluation: read finished problems from disk, sample the others, write and print the result.

problems --> done before? --> rollouts --> rewards --> verdicts --> a part on disk
                  |                                                      |
                  +-------------------------> result.json <--------------+
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_dist.chat.template import writes_date
from grpo_dist.config import Config, DataSourceConfig, EvaluationConfig
from grpo_dist.data.readers import DataRow, brings_columns, column, common_columns, read_all
from grpo_dist.data.sources import OwnProblems
from grpo_dist.data.tasks import own_problems
from grpo_dist.errors import UserError, refusals
from grpo_dist.evaluation.sampling import STAGE, Draw, EvalSet, EvaluationHandles, sample_chunks
from grpo_dist.rewards.data_columns import asked_columns
from grpo_dist.runs.dated import dated
from grpo_dist.runs.directories import check_writable
from grpo_dist.runs.prepare import (
    PromptSections,
    check_columns,
    check_rendering,
    check_scoring,
    load_tokenizer,
    prepare_eval,
    resolve_model,
)
from grpo_dist.runs.start_checks import check_length
from grpo_dist.runtime.concurrency import in_thread
from grpo_dist.runtime.stage_log import stage, stages_logged
from grpo_dist.tools.evaluate.benchmarks import breakdown
from grpo_dist.tools.evaluate.compare import compare
from grpo_dist.tools.evaluate.result import ALL, MEAN, RESULT, EvaluationResult, JudgedProblem, read_earlier
from grpo_dist.tools.evaluate.store import (
    Identity,
    Store,
    default_directory,
    recorded_date,
    settings_of,
)
from grpo_dist.tools.evaluate.table import print_comparison, print_result
from grpo_dist.tools.evaluate.target import configuration
from grpo_dist.tools.evaluate.verdicts import Verdict, VerdictMaker, key_of
from grpo_dist.tools.sampling import evaluation_workers
from grpo_dist.types import Group, Prompt

_SAMPLES_PER_PART = 64  # at most this much sampling (or one problem) is lost to a kill


@dataclass(frozen=True)
class Asked:
    """A set of problems. ``by``: by uid, the values of the columns that results are broken down by."""

    name: str
    prompts: list[Prompt]
    by: Mapping[str, Mapping[str, str]]


def evaluate_model(
    config: Config,
    say: Callable[[str], None],
    *,
    directory: Path | None = None,
    by: Sequence[str] = (),
    fresh: bool = False,
) -> EvaluationResult:
    """Sample `model.path` on the problems of `data.eval` that have no final verdict, and print the estimates.

    Args:
        directory: of the results; None derives it from model and settings.
        by: columns that results are broken down by.
        fresh: start over, and keep an existing directory as a backup.

    Raises UserError for invalid input, and for a directory that holds another evaluation.
    """
    with stages_logged(say):
        with refusals():
            if not config.data.eval:
                raise ValueError("data.eval is empty; name at least one evaluation set")
            with stage("model", config.model.path):
                model_dir = resolve_model(
                    config.model, config.sft, config.seed, say, trains=False, day=config.data.day
                )
                check_length(config.model, model_dir, config.max_length)
                identity = Identity.of(config.model.path, model_dir, settings_of(config))
            place = directory or default_directory(config.model, config.output_dir, identity)
            check_writable(place)
            config = dated(config, None if fresh else recorded_date(place))
            with stage("problems", "are read and tokenized"):
                sections = PromptSections(config.data, config.rewards, config.environments)
                tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
                if writes_date(tokenizer):
                    identity = identity.with_date(config.data.template_date)
                check_rendering(config.data, config.sampling, tokenizer, say)
                asked = _asked(sections, config.evaluation, tokenizer, by, say)
            store = Store(place, identity, fresh=fresh)
            store.begin()
            earlier = read_earlier(place, {own.name: {p.uid for p in own.prompts} for own in asked})
        if store.moved:
            say(f"{place}: moved the earlier evaluation to {store.moved}")
        with store.alone():
            sample_s = config.cluster.timeouts.sample_s
            draw = Draw.of(config.evaluation, config.sampling, seed=config.seed, sample_s=sample_s)
            if missing := _missing(asked, store, say):
                with refusals():
                    check_scoring(config.rewards, config.sampling)
                workers = evaluation_workers(config, model_dir)
                verdicts = VerdictMaker(config.rewards)
                asyncio.run(_sample(workers, draw, verdicts, missing, store, say))
            with stage("result", quiet=True):
                result = EvaluationResult.of(identity, list(_judged(asked, store, config.evaluation.k)))
                result.with_earlier(earlier).write(place)
    print_result(result, str(place))
    if unscored := result.unscored_sets:
        say(
            f"no sample of {', '.join(unscored)} could be scored: it has no estimate, and the estimates of "
            f"`{ALL}` and `{MEAN}` leave it out"
        )
    names = {own.name for own in asked}
    if others := [name for name in dict.fromkeys(judged.set for judged in earlier) if name not in names]:
        say(f"{RESULT} also has the earlier results on {', '.join(others)}")
    return result


def _asked(
    sections: PromptSections,
    evaluation: EvaluationConfig,
    tokenizer: Any,
    by: Sequence[str],
    say: Callable[[str], None],
) -> list[Asked]:
    """Load the sets with their prompts.

    Columns that only the breakdown needs are hidden from the rewards, which see the same as in training.
    """
    own, sets = own_problems(sections.data, sections.environments), sections.data.eval
    columns = [_columns(source, by, own) for source in sets]
    for name in by:
        if not any(name in found for found in columns):
            raise ValueError(f"--by {name}: no data set has such a column")
    sources = [
        s.model_copy(update={"columns": tuple(dict.fromkeys([*s.columns, *found]))})
        for s, found in zip(sets, columns, strict=True)
    ]
    read = read_all(sources, "data.eval", own, asked=asked_columns(sections.rewards))
    scored = [_as_scored(source, rows) for source, (_, rows) in zip(sets, read, strict=True)]
    check_columns(sections.rewards, scored, "data.eval")
    loaded = prepare_eval(sections, read, tokenizer, [], say)
    return [_split(*found, evaluation) for found in zip(loaded, sets, columns, strict=True)]


def _columns(source: DataSourceConfig, by: Sequence[str], own: OwnProblems) -> list[str]:
    """Return the breakdown columns that all rows of ``source`` have."""
    wanted = by or breakdown(source)
    return [name for name in common_columns(source, own) if name in wanted]


def _as_scored(source: DataSourceConfig, rows: Sequence[DataRow]) -> Sequence[DataRow]:
    """Return ``rows`` with the columns that rewards see."""
    if brings_columns(source):
        return rows
    return [replace(row, columns={name: row.columns[name] for name in source.columns}) for row in rows]


def _split(
    found: EvalSet, source: DataSourceConfig, by: Sequence[str], evaluation: EvaluationConfig
) -> Asked:
    prompts = found.prompts[: evaluation.max_prompts]
    values = {p.uid: {name: str(column(p.columns, name)) for name in by} for p in prompts}
    if not brings_columns(source):
        prompts = [replace(p, columns={name: p.columns[name] for name in source.columns}) for p in prompts]
    return Asked(found.name, prompts, values)


def _missing(asked: list[Asked], store: Store, say: Callable[[str], None]) -> list[tuple[str, list[Prompt]]]:
    """Return the name of each set with its prompts that have no final verdict, and say how many have one."""
    parts = []
    for own in asked:
        known = {key for key, verdict in store.verdicts(own.name).items() if verdict.is_final}
        prompts = [p for p in own.prompts if key_of(p) not in known]
        parts += [(own.name, prompts)] if prompts else []
    todo, total = sum(len(prompts) for _, prompts in parts), sum(len(own.prompts) for own in asked)
    if not todo:
        say(f"all {total} problems are done: {store.directory}")
    elif todo < total:
        say(f"{total - todo} of {total} problems are done")
    return parts


async def _sample(
    starting: AbstractAsyncContextManager[EvaluationHandles],
    draw: Draw,
    verdicts_of: VerdictMaker,
    missing: list[tuple[str, list[Prompt]]],
    store: Store,
    say: Callable[[str], None],
) -> None:
    size = max(1, _SAMPLES_PER_PART // draw.samples)
    parts = [
        (name, prompts[first : first + size])
        for name, prompts in missing
        for first in range(0, len(prompts), size)
    ]
    total = sum(len(prompts) for _, prompts in parts)
    progress = _Progress(total, say)
    with verdicts_of as maker:

        async def finished(number: int, groups: list[Group]) -> None:
            verdicts = await in_thread(partial(maker.verdicts, groups))
            store.add(parts[number][0], groups, verdicts)
            progress.add(len(groups))

        chunks = {number: prompts for number, (_, prompts) in enumerate(parts)}
        async with starting as workers:
            with stage("evaluation", f"{total} problems"):
                await sample_chunks(draw, workers, chunks, finished, stage=STAGE, what="evaluate")


class _Progress:
    """Reports progress ten times over an evaluation."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total, self._say, self._done = total, say, 0

    def add(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        if 10 * before // self._total < 10 * self._done // self._total:
            self._say(f"evaluate: {self._done} of {self._total} problems")


def _judged(asked: list[Asked], store: Store, ks: Sequence[int]) -> list[JudgedProblem]:
    """Return every problem with its verdict, in the order of the data."""
    judged = []
    for own in asked:
        known: dict[str, Verdict] = store.verdicts(own.name)
        judged += [JudgedProblem.of(own.name, p, own.by[p.uid], known[key_of(p)], ks) for p in own.prompts]
    return judged


def evaluate_target(
    target: str,
    data: Sequence[str],
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    data_dir: Path | None = None,
    directory: Path | None = None,
    by: Sequence[str] = (),
    fresh: bool = False,
) -> EvaluationResult:
    """Run `grpo-dist eval TARGET DATA ... key=value ...`; see `target.configuration` and `evaluate_model`."""
    config = configuration(target, data, overrides, data_dir=data_dir)
    return evaluate_model(config, say, directory=directory, by=by, fresh=fresh)


def compare_results(first: Path, second: Path, output: Path | None) -> None:
    """Compare two results: print the table, and write it to ``output`` unless that is None."""
    with refusals():
        found = compare(first, second)
        print_comparison(found)
        if output is not None:
            if output.is_dir():
                raise UserError(f"--output {output} is a directory; with --compare it names a JSON file")
            found.write(output)
