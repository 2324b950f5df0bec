"""Run an evaluation: read finished problems from disk, sample the others, write and print the result.

problems --> done before? --> rollouts --> rewards --> verdicts --> a part on disk
                  |                                                      |
                  +-------------------------> result.json <--------------+
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_dist.chat.template import writes_date
from grpo_dist.config import Config
from grpo_dist.data.readers import brings_columns, column, common_columns, read_all
from grpo_dist.data.tasks import environment_problems
from grpo_dist.errors import as_user_errors
from grpo_dist.evaluation.result import ALL, MEAN, JudgedProblem, key_of
from grpo_dist.evaluation.sampling import STAGE, Draw, sample_chunks
from grpo_dist.rewards.checks import asked_columns
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.runs.models import load_tokenizer, resolve_model
from grpo_dist.runs.prepare import check_columns, check_rendering, check_scoring, prepare_eval
from grpo_dist.runs.run_directory import check_writable, set_template_date
from grpo_dist.runs.start_checks import check_length
from grpo_dist.runtime.concurrency import deadline, run_in_thread
from grpo_dist.runtime.stage_log import stage, stages_logged
from grpo_dist.runtime.tables import print_lines, wide_console
from grpo_dist.tools.evaluate.result import EvaluationResult, make_verdict, print_measured
from grpo_dist.tools.evaluate.store import Identity, Store, default_directory, recorded_date, sample_settings
from grpo_dist.tools.evaluate.target import breakdown
from grpo_dist.types import Group, Prompt

_SAMPLES_PER_PART = 64  # a kill loses at most this many samples (or one problem)


@dataclass(frozen=True)
class ProblemSet:
    """A set of problems. ``by``: uid -> values of the breakdown columns."""

    name: str
    prompts: list[Prompt]
    by: Mapping[str, Mapping[str, str]]


def evaluate_model(
    config: Config,
    say: Callable[[str], None],
    *,
    directory: Path | None = None,
    by: Sequence[str] = (),
) -> EvaluationResult:
    """Sample `model.path` on the unfinished problems of `data.eval`, and print the estimates.

    Args:
        directory: result directory; None derives it from model and settings.
        by: columns to break results down by.

    Raises UserError for invalid input, or if the directory holds another evaluation.
    """
    with stages_logged(say):
        with as_user_errors():
            if not config.data.eval:
                raise ValueError("data.eval is empty; name at least one evaluation set")
            with stage("model", config.model.path):
                model_dir = resolve_model(
                    config.model, config.sft, config.seed, say, trains=False, day=config.data.day
                )
                check_length(config.model, model_dir, config.max_length)
                identity = Identity.from_settings(config.model.path, model_dir, sample_settings(config))
            directory = directory or default_directory(config.model, config.output_dir, identity)
            check_writable(directory)
            config = set_template_date(config, recorded_date(directory))
            with stage("problems", "are read and tokenized"):
                tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
                if writes_date(tokenizer):
                    identity = identity.add_date(config.data.template_date)
                check_rendering(config, tokenizer, say)
                sets = _read_sets(config, tokenizer, by, say)
            store = Store(directory, identity)
            store.begin()
        with store.alone():
            if missing := _missing(sets, store, say):
                with as_user_errors():
                    check_scoring(config.rewards, config.sampling)
                _sample(config, model_dir, missing, store, say)
            with stage("result", quiet=True):
                result = EvaluationResult.from_problems(identity, _judged(sets, store, config.evaluation.k))
                result.write(directory)
    console = wide_console()
    print_measured(console, result.identity.model, result.measured)
    print_lines(console, [f"results: {directory}"])
    if unscored := result.unscored_sets:
        say(
            f"no sample of {', '.join(unscored)} could be scored: it has no estimate, and the estimates of "
            f"`{ALL}` and `{MEAN}` leave it out"
        )
    return result


def _read_sets(
    config: Config,
    tokenizer: Any,
    by: Sequence[str],
    say: Callable[[str], None],
) -> list[ProblemSet]:
    """Read the sets with their prompts.

    Hides columns that only the breakdown needs from the rewards, which see the same as in training.
    """
    data = config.data
    environment_columns = environment_problems(data, config.environments)
    sources = data.resolve_prompts(data.eval)
    columns = [
        [name for name in common_columns(source, environment_columns) if name in (by or breakdown(source))]
        for source in sources
    ]
    for name in by:
        if not any(name in of_set for of_set in columns):
            raise ValueError(f"--by {name}: no data set has such a column")
    with_columns = [
        s.model_copy(update={"columns": tuple(dict.fromkeys([*s.columns, *of_set]))})
        for s, of_set in zip(sources, columns, strict=True)
    ]

    def visible(source: Any, items: Sequence[Any]) -> list[Any]:
        """Return rows or prompts with only the columns for rewards."""
        if brings_columns(source):
            return list(items)
        names = {*source.columns, *asked}
        return [replace(x, columns={n: v for n, v in x.columns.items() if n in names}) for x in items]

    asked = asked_columns(config.rewards)
    rows = read_all(with_columns, "data.eval", environment_columns, asked=asked)
    scored = [(source, visible(source, of_set)) for source, (_, of_set) in zip(sources, rows, strict=True)]
    check_columns(config.rewards, scored, "data.eval")
    sets = []
    loaded = prepare_eval(config, rows, tokenizer, [], say)
    for eval_set, source, names in zip(loaded, sources, columns, strict=True):
        values = {p.uid: {name: str(column(p.columns, name)) for name in names} for p in eval_set.prompts}
        sets.append(ProblemSet(eval_set.name, visible(source, eval_set.prompts), values))
    return sets


def _missing(
    sets: list[ProblemSet], store: Store, say: Callable[[str], None]
) -> list[tuple[str, list[Prompt]]]:
    """Return each set's name with its unfinished prompts; report how many are finished."""
    missing = []
    for problems in sets:
        final = {key for key, verdict in store.verdicts(problems.name).items() if verdict.is_final}
        if prompts := [p for p in problems.prompts if key_of(p) not in final]:
            missing.append((problems.name, prompts))
    todo, total = sum(len(prompts) for _, prompts in missing), sum(len(s.prompts) for s in sets)
    if not todo:
        say(f"all {total} problems are done: {store.directory}")
    elif todo < total:
        say(f"{total - todo} of {total} problems are done")
    return missing


def _sample(
    config: Config,
    model_dir: Path,
    missing: list[tuple[str, list[Prompt]]],
    store: Store,
    say: Callable[[str], None],
) -> None:
    draw = Draw.from_config(config, config.evaluation)
    size = max(1, _SAMPLES_PER_PART // draw.samples)
    parts = [
        (name, prompts[first : first + size])
        for name, prompts in missing
        for first in range(0, len(prompts), size)
    ]
    total, done = sum(len(prompts) for _, prompts in parts), 0

    async def finished(number: int, groups: list[Group]) -> None:
        nonlocal done
        verdicts = await run_in_thread(lambda: [make_verdict(g, config.rewards, pool) for g in groups])
        store.add(parts[number][0], groups, verdicts)
        before, done = done, done + len(groups)
        if 10 * before // total < 10 * done // total:
            say(f"evaluate: {done} of {total} problems")

    chunks = {number: prompts for number, (_, prompts) in enumerate(parts)}
    with GraderPool.from_config(config.rewards) as pool:
        sample_with_engines(config, model_dir, draw, chunks, finished, number=STAGE, what="evaluate")


def sample_with_engines(
    config: Config,
    model_dir: Path,
    draw: Draw,
    chunks: Mapping[int, list[Prompt]],
    finished: Callable[[int, list[Group]], Awaitable[None]],
    *,
    number: int,
    what: str,
) -> None:
    """Start a cluster with the model in ``model_dir``, sample as `sample_chunks` does, and stop the cluster.
    ``number``: stage number in request seeds.
    """
    from actors.cluster import Cluster  # imports Ray

    async def sample() -> None:
        async with Cluster(config) as cluster:
            start = "start: engine and graders up"
            async with deadline(config.cluster.timeouts.up_s, start, explain=cluster.where_stuck):
                workers = await cluster.start_evaluation(model_dir)
            with stage(what, f"{sum(map(len, chunks.values()))} prompts"):
                await sample_chunks(draw, workers, chunks, finished, stage=number, what=what)

    asyncio.run(sample())


def _judged(sets: list[ProblemSet], store: Store, ks: Sequence[int]) -> list[JudgedProblem]:
    judged = []
    for problems in sets:
        verdicts = store.verdicts(problems.name)
        judged += [
            JudgedProblem.from_verdict(problems.name, p, problems.by[p.uid], verdicts[key_of(p)], ks)
            for p in problems.prompts
        ]
    return judged
