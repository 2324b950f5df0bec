"""Loads and checks everything that needs neither accelerator nor actor: model, tokenizer, prompts, run
directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.chat.batches import tokenizer_state
from grpo_dist.chat.ends import ends_of
from grpo_dist.chat.template import writes_date
from grpo_dist.config import (
    Config,
    DataConfig,
    DataSourceConfig,
    RewardsConfig,
    SamplingConfig,
)
from grpo_dist.config.text import names_in
from grpo_dist.data.columns import (
    STORED_FROM,
    Prompts,
    Repeated,
    column,
    distinct_of,
    each_place,
    load,
    save,
    store_key,
)
from grpo_dist.data.demonstrations import Demonstration, Stream, load_demonstrations
from grpo_dist.data.pools import check_pools
from grpo_dist.data.prompts import (
    BuiltPrompts,
    Dropped,
    EncodedRows,
    PromptFormat,
    build_prompts,
    check_overlap,
    doubled_prefills,
    encode_rows,
    number_uids,
)
from grpo_dist.data.readers import (
    DataRow,
    DataRows,
    SourceRows,
    common_columns,
    find_duplicates,
    media_problem,
)
from grpo_dist.data.stream import check_weights
from grpo_dist.data.tasks import source_tasks
from grpo_dist.errors import refuse
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.loop.pipeline import Admission
from grpo_dist.rewards.checks import (
    column_problems,
    combination_problems,
    describe_no_answers,
    find_unreadable,
    is_no_answer,
    reward_problems,
)
from grpo_dist.rewards.models import check_model
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.text import alternatives
from grpo_dist.runs.identity import DataOrigin
from grpo_dist.runs.prepare_teachers import load_teachers
from grpo_dist.runtime.model_files import weights_digest
from grpo_dist.runtime.stage_log import stage
from grpo_dist.types import Prompt, Thought


@dataclass(frozen=True)
class RunInputs:
    model_dir: Path
    prompts: Sequence[Prompt]
    eval_sets: list[EvalSet]
    dropped: list[Dropped] = field(default_factory=list)  # training rows without a prompt
    warnings: list[str] = field(default_factory=list)  # about the data; printed already
    teacher_dirs: Mapping[str, Path] = field(default_factory=dict)  # models, by teacher name
    demonstrations: Sequence[Demonstration] = ()  # rows of `config.demonstrations`
    origin: DataOrigin = field(default_factory=DataOrigin)  # origin of prompts and demonstrations
    tokenizer: Any = None  # the policy's

    @property
    def trained(self) -> Prompts:
        """Return all training data: prompts and demonstrations."""
        return Prompts.join([self.prompts, self.demonstrations])

    @cached_property
    def model_digests(self) -> dict[str, str]:
        """`weights_digest` of the models that the driver has read, by configuration key."""
        teachers = {f"distillation.teachers.{name}.model": path for name, path in self.teacher_dirs.items()}
        models = {"model.path": self.model_dir, **teachers}
        return {key: weights_digest(path) for key, path in models.items()}


def build_inputs(
    config: Config,
    model_dir: Path,
    tokenizer: Any,
    train_rows: Sequence[SourceRows],
    eval_rows: Sequence[SourceRows],
    say: Callable[[str], None],
) -> RunInputs:
    """Turn rows into prompts for the model. Raises ValueError as `load_inputs` does."""
    for key, sources in (("data.train", train_rows), ("data.eval", eval_rows)):
        check_columns(config.rewards, sources, key)
    warnings: list[str] = []

    def warn(message: str) -> None:
        say(message)
        warnings.append(message)

    check_rendering(config, tokenizer, warn)
    with stage("prompts", "are tokenized"):
        loaded = train_prompts(config, train_rows, tokenizer, warn)
    prompts: Sequence[Prompt] = loaded.prompts
    needed = config.batch.prompts_per_step
    if len(prompts) < needed:
        raise ValueError(
            f"data.train: {len(prompts)} prompts, but `batch.prompts_per_step` = {needed} must be drawn "
            f"without repetition; add data or set batch.prompts_per_step to at most {len(prompts)}"
        )
    draws_passes = config.data.order.name in ("epochs", "length") and not config.data.weights
    if loaded.dropped and draws_passes and not config.dynamic_sampling.enabled:
        warn(
            f"note: data.train: {len(loaded.dropped)} rows are dropped, which `epochs` counts: `steps` = "
            f"{config.steps} are {config.steps * needed / len(prompts):.3g} passes over the other "
            f"{len(prompts)}; for one pass set `steps` = {len(prompts) // needed}"
        )
    check_pools(config.data, prompts, [source.label for source, _ in train_rows])
    check_weights(config.data, prompts, in_flight=Admission.from_config(config, prompts).drawn)
    with stage("evaluation sets", quiet=True):
        eval_sets = prepare_eval(config, eval_rows, tokenizer, prompts, warn)
    further = config.distillation.teachers or config.demonstrations is not None
    with stage("teachers and demonstrations", "are read", quiet=not further):
        prompts, teacher_dirs = load_teachers(config, prompts, (model_dir, tokenizer), say)
        demonstrations: Sequence[Demonstration] = []
        if config.demonstrations is not None:
            stream = Stream(config.demonstrations.data, config.seed, config.max_length)
            demonstrations = load_demonstrations(stream, tokenizer, day=config.data.day, say=warn)
    row_uids = chain(loaded.row_uids, column(demonstrations, "row_uid"))
    origin = DataOrigin.from_rows(row_uids, tokenizer, model_dir, config.data)
    return RunInputs(
        model_dir,
        prompts,
        eval_sets,
        loaded.dropped,
        warnings,
        teacher_dirs,
        demonstrations,
        origin,
        tokenizer,
    )


def check_rendering(config: Config, tokenizer: Any, say: Callable[[str], None]) -> None:
    """Raise ValueError if nothing ends a sample. Report an end that only the chat template names, and the
    date that it writes.
    """
    data, ends = config.data, ends_of(config.data, tokenizer)
    ends.check(None if config.has_environments else config.sampling.stop)
    if ends.note:
        say(ends.note)
    for note in doubled_prefills(data, tokenizer):
        say(note)
    if data.chat_template == "model" and data.day is not None and writes_date(tokenizer):
        say(
            f"note: the chat template writes the date into every prompt: {data.day} (`data.template_date`), "
            "also where the run resumes on another day"
        )


def check_columns(rewards: RewardsConfig, sources: Iterable[SourceRows], key: str) -> None:
    """Raise ValueError if rewards lack columns in the rows of ``sources``, or cannot read them. ``key``:
    configuration key of the sources.
    """
    problems = (
        problem
        for number, (source, rows) in enumerate(sources)
        for problem in column_problems(
            rewards, distinct_of(rows), f"add it to `{key}.{number}.columns`", partial(common_columns, source)
        )
    )
    refuse(dict.fromkeys(problems))  # wrong kwargs are wrong for all sources


def train_prompts(
    config: Config,
    sources: Sequence[SourceRows],
    tokenizer: Any,
    say: Callable[[str], None],
) -> BuiltPrompts:
    """Turn the rows of all ``sources`` into prompts, in order. No two have the same uid."""
    sources = drop_duplicates(config.data, sources, "data.train", say)
    parts = [load_prompts(config, source, rows, tokenizer, say) for source, rows in sources]
    if len(parts) > 1:
        number_uids([built.prompts for built in parts])
    dropped = [row for built in parts for row in built.dropped]
    rows_read = tuple(rows for built in parts for rows in built.rows)
    return BuiltPrompts(Prompts.join(built.prompts for built in parts), dropped, rows_read)


def drop_duplicates(
    data: DataConfig, sources: Sequence[SourceRows], key: str, say: Callable[[str], None]
) -> list[SourceRows]:
    """Report rows that repeat a problem; with `data.deduplicate` return only the first row of each."""
    duplicates = find_duplicates(data, sources)
    for warning in duplicates.warnings(key, deduplicated=data.deduplicate):
        say(warning)
    if not data.deduplicate:
        return list(sources)
    return [(source, rows) for source, rows in duplicates.first if rows]


def prepare_eval(
    config: Config,
    sources: Sequence[SourceRows],
    tokenizer: Any,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> list[EvalSet]:
    """Return the held-out sets. Raises ValueError if one shares problems with ``prompts``, unless
    `data.overlap` allows it.
    """
    data, eval_sets = config.data, []
    whole = {
        source.label
        for source in data.resolve_prompts((*data.train, *data.eval))
        if set(names_in(source.template or "")) - {"problem"}
    }
    for source, rows in sources:
        name = source.label
        ((_, rows),) = drop_duplicates(data, [(source, rows)], f"data.eval {name}", say)
        eval_set = EvalSet(name, load_prompts(config, source, rows, tokenizer, say).prompts)
        overlap = check_overlap(prompts, eval_set.prompts, whole)
        if overlap and data.overlap == "refuse":
            raise ValueError(f"data.eval {eval_set.name}: {overlap}; remove them, or set data.overlap=warn")
        if overlap:
            say(f"warning: data.eval {eval_set.name}: {overlap}")
        eval_sets.append(eval_set)
    names = [s.name for s in eval_sets]
    if len(set(names)) != len(names):
        raise ValueError(f"data.eval: two sets have the same name: {names}; give each its own `name`")
    return eval_sets


def check_scoring(rewards: RewardsConfig, sampling: SamplingConfig) -> None:
    """Raise ValueError for a reward function or model that cannot be used; see `scoring_problems`."""
    refuse(scoring_problems(rewards, sampling))


def scoring_problems(
    rewards: RewardsConfig, sampling: SamplingConfig, pool: GraderPool | None = None
) -> Iterator[str]:
    """Yield a message for every unusable reward. ``pool``: loads user functions; None: a new one."""
    yield from combination_problems(rewards)
    yield from reward_problems(rewards, max_new_tokens=sampling.shortest, pool=pool)
    for model in rewards.models:
        try:
            check_model(model)
        except ValueError as error:
            yield str(error)


def load_prompts(
    config: Config,
    source: DataSourceConfig,
    rows: Sequence[DataRow],
    tokenizer: Any,
    say: Callable[[str], None],
) -> BuiltPrompts:
    """Turn the ``rows`` of ``source`` into prompts. With many rows, their tokens and the remarks on them are
    stored for the next start.
    """
    data = config.data
    rows = DataRows.from_rows(rows)
    if data.environment_of(source) is not None:
        rows = rows.apart()  # an environment may ask equal problems in different words
    tasks = source_tasks(data, config.environments, source, rows, tokenizer)
    prompt_format = replace(PromptFormat.from_config(data, source), thought_tags=config.rewards.thought_tags)
    is_stored = tasks is None and len(rows) >= STORED_FROM
    key = _prompts_key(config, rows, tokenizer) if is_stored else ""
    remarks: list[str] | None = None
    if key and (stored := load(key)) is not None:
        arrays, (kinds, warnings, remarks) = stored
        thoughts = [Thought(*kind) for kind in kinds]
        encoded = EncodedRows.from_store(arrays, {"thoughts": thoughts}, warnings=warnings)
    else:
        encoded = encode_rows(rows, tokenizer, prompt_format, tasks)
    built = build_prompts(
        rows,
        tokenizer,
        prompt_format,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong,
        encoded=encoded,
        key=key,
    )
    if remarks is None:
        remarks = list(_remarks(config, source, rows, built))
        if key:
            arrays, names = encoded.stored()
            save(key, arrays, [list(map(astuple, names["thoughts"])), encoded.warnings, remarks])
    for remark in remarks:
        say(remark)
    return built


def _prompts_key(config: Config, rows: DataRows, tokenizer: Any) -> str:
    """Return a key of what determines the tokens of ``rows`` and the remarks on them; "": unknown."""
    state = tokenizer_state(tokenizer, config.data.day) if rows.key else None
    if state is None:
        return ""
    settings = [
        config.data.model_dump(mode="json", exclude={"train", "eval", "order", "deduplicate", "overlap"}),
        config.rewards.model_dump(mode="json"),
    ]
    return store_key(["prompts", rows.key, state, settings])


def _remarks(config: Config, source: DataSourceConfig, rows: DataRows, built: BuiltPrompts) -> Iterator[str]:
    """Yield remarks to the user about the rows of a source."""
    name, dropped = source.label, built.dropped
    table = rows.distinct
    distinct = dict[str, int]()  # answers, with their numbers
    codes = np.array([distinct.setdefault(answer, len(distinct)) for answer in table.answers], np.int32)
    answers = Repeated(list(distinct), codes[rows.codes])
    several = answers.where(lambda answer: len(alternatives(answer)) > 1)
    if len(several):
        row = rows[int(several[0])]
        yield (
            f"{name}: {len(several)} of {len(rows)} rows have several answers, of which any is right, e.g. "
            f"{row.location}: {row.answer[:60]}; set `multiple_answers` of the source to all where they are "
            "the answer together"
        )
    answered = rows.places("left_out", bool)
    if len(answered):
        row = rows[int(answered[0])]
        yield (
            f"{name}: {len(answered)} of {len(rows)} rows end with the assistant's message, which is left "
            f"out: the policy writes it; e.g. {row.location}: {row.left_out[:60]!r}"
        )
    for warning in built.warnings:
        yield f"{name}: {warning}"
    if dropped:
        yield f"{name}: {len(dropped)} of {len(rows)} prompts dropped, e.g. {dropped[0].reason}"
    if problem := media_problem(rows):
        yield f"warning: {name}: {problem}"
    without = map(rows.__getitem__, answers.where(is_no_answer).tolist())
    if no_answers := describe_no_answers((row.location, row.answer) for row in without):
        yield (
            f"warning: {name}: gold answers that are no answers: {no_answers}; a policy is rewarded for "
            "writing these words; remove the rows"
        )
    golds = list(each_place(answers.distinct, answers.codes))
    unreadable, checked = find_unreadable(golds, config.rewards)
    if unreadable:
        first = ", ".join(f"{rows.location(i)}: {rows[i].answer[:60]!r}" for i in unreadable[:3])
        yield (
            f"{name}: {len(unreadable)} of {checked} gold answers are not parsable mathematics and are "
            f"matched as text, e.g. {first}"
        )
