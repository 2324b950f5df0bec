"""Loads and checks everything that needs neither accelerator nor actor: model, tokenizer, prompts, run
directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import date
from functools import partial
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
    EnvironmentsConfig,
    ModelConfig,
    RewardsConfig,
    SamplingConfig,
    SFTConfig,
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
from grpo_dist.data.demonstrations import Demonstration
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
from grpo_dist.data.sources import find_hub_failure
from grpo_dist.data.stream import check_weights
from grpo_dist.data.tasks import source_tasks
from grpo_dist.demo.model import cached_model, random_model
from grpo_dist.errors import expanded, refuse, searched
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.loop.pipeline import Admission
from grpo_dist.policy.lora import apply_start_adapter
from grpo_dist.policy.text_model import usable_model
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
from grpo_dist.runs.cold_start import run_sft
from grpo_dist.runs.identity import DataOrigin
from grpo_dist.runs.prepare_teachers import load_stream, load_teachers
from grpo_dist.runs.run_weights import checkpoint_model, is_supervised_run
from grpo_dist.runs.start_checks import readable_model
from grpo_dist.runs.user_trials import user_code_problems
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.hardware import quiet_libraries
from grpo_dist.runtime.model_files import cached, describe_gguf, fingerprint, is_checkpoint
from grpo_dist.runtime.stage_log import stage
from grpo_dist.types import Prompt, Thought


@dataclass(frozen=True, slots=True)
class PromptSections:
    """The sections that decide how rows become prompts."""

    data: DataConfig
    rewards: RewardsConfig
    environments: EnvironmentsConfig


@dataclass(frozen=True)
class RunInputs:
    model_dir: Path
    prompts: Sequence[Prompt]
    eval_sets: list[EvalSet]
    dropped: list[Dropped] = field(default_factory=list)  # training rows that became no prompts
    warnings: list[str] = field(default_factory=list)  # about the data; they have been printed
    teacher_dirs: Mapping[str, Path] = field(default_factory=dict)  # of the teachers' models, by name
    demonstrations: Sequence[Demonstration] = ()  # of `config.demonstrations`
    origin: DataOrigin = field(default_factory=DataOrigin)  # of all that is trained on
    tokenizer: Any = None  # the policy's

    @property
    def trained(self) -> Prompts:
        """Return all that is trained on: prompts and demonstrations."""
        return Prompts.join([self.prompts, self.demonstrations])


def build_inputs(
    config: Config,
    model_dir: Path,
    train_rows: Sequence[SourceRows],
    eval_rows: Sequence[SourceRows],
    say: Callable[[str], None],
) -> RunInputs:
    """Turn rows into prompts for the model. Raises ValueError as `load_inputs` does."""
    for key, sources in (("data.train", train_rows), ("data.eval", eval_rows)):
        check_columns(config.rewards, sources, key)
    with stage("tokenizer", "is loaded"):
        tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
    refuse(user_code_problems(config.rollout.user_components, config.code_paths, tokenizer))
    warnings: list[str] = []

    def warn(message: str) -> None:
        say(message)
        warnings.append(message)

    check_rendering(config, tokenizer, warn)
    sections = PromptSections(config.data, config.rewards, config.environments)
    with stage("prompts", "are tokenized"):
        loaded = train_prompts(sections, train_rows, tokenizer, warn)
    prompts: Sequence[Prompt] = loaded.prompts
    needed = config.batch.prompts_per_step
    if len(prompts) < needed:
        raise ValueError(
            f"data.train: {len(prompts)} prompts, but `batch.prompts_per_step` = {needed} must be drawn "
            f"without repetition; add data or set batch.prompts_per_step to at most {len(prompts)}"
        )
    check_pools(config.data, prompts, [source.label for source, _ in train_rows])
    check_weights(config.data, prompts, in_flight=Admission.from_config(config, prompts).drawn)
    with stage("evaluation sets", quiet=True):
        eval_sets = prepare_eval(sections, eval_rows, tokenizer, prompts, warn)
    further = config.distillation.teachers or config.demonstrations is not None
    with stage("teachers and demonstrations", "are read", quiet=not further):
        prompts, teacher_dirs = load_teachers(
            config.distillation,
            config.model,
            config.data,
            prompts,
            (model_dir, tokenizer),
            longest=config.sampling.longest,
            resolve=lambda model: resolve_model(model, None, config.seed, say, key="`model`"),
            tokenizer_of=lambda path: load_tokenizer(path, config.model.trust_remote_code),
        )
        demonstrations = load_stream(
            config.demonstrations,
            config.max_length,
            tokenizer,
            seed=config.seed,
            day=config.data.day,
            say=warn,
        )
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
    """Raise ValueError where nothing ends a sample, and tell where the chat template alone names its end, and
    which date it writes.
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
    """Raise ValueError where rewards lack columns in the rows of ``sources``, or cannot read them. ``key``:
    of the sources in the configuration.
    """
    refuse(
        problem
        for number, (source, rows) in enumerate(sources)
        for problem in column_problems(
            rewards, distinct_of(rows), f"add it to `{key}.{number}.columns`", partial(common_columns, source)
        )
    )


def train_prompts(
    sections: PromptSections,
    sources: Sequence[SourceRows],
    tokenizer: Any,
    say: Callable[[str], None],
) -> BuiltPrompts:
    """Turn the rows of all ``sources`` into prompts, in order. No two have the same uid."""
    sources = drop_duplicates(sections.data, sources, "data.train", say)
    parts = [load_prompts(sections, source, rows, tokenizer, say) for source, rows in sources]
    if len(parts) > 1:
        number_uids([built.prompts for built in parts])
    dropped = [row for built in parts for row in built.dropped]
    rows_read = tuple(rows for built in parts for rows in built.rows)
    return BuiltPrompts(Prompts.join(built.prompts for built in parts), dropped, rows_read)


def drop_duplicates(
    data: DataConfig, sources: Sequence[SourceRows], key: str, say: Callable[[str], None]
) -> list[SourceRows]:
    """Say which rows repeat a problem; with `data.deduplicate` return the first row of each alone."""
    duplicates = find_duplicates(data, sources)
    for warning in duplicates.warnings(key, deduplicated=data.deduplicate):
        say(warning)
    if not data.deduplicate:
        return list(sources)
    return [(source, rows) for source, rows in duplicates.first if rows]


def prepare_eval(
    sections: PromptSections,
    sources: Sequence[SourceRows],
    tokenizer: Any,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> list[EvalSet]:
    """Return the held-out sets. Raises ValueError where one shares problems with ``prompts``, unless
    `data.overlap` allows it.
    """
    data, eval_sets = sections.data, []
    whole = {
        source.label
        for source in data.resolve_prompts((*data.train, *data.eval))
        if set(names_in(source.template or "")) - {"problem"}
    }
    for source, rows in sources:
        name = source.label
        ((_, rows),) = drop_duplicates(data, [(source, rows)], f"data.eval {name}", say)
        eval_set = EvalSet(name, load_prompts(sections, source, rows, tokenizer, say).prompts)
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


def resolve_model(
    model: ModelConfig,
    sft: SFTConfig | None,
    seed: int,
    say: Callable[[str], None],
    *,
    train_first: bool = True,
    trains: bool = True,
    trains_adapter: bool = False,
    key: str = "model.path",
    day: date | None = None,
) -> Path:
    """Return the model's directory: made here (`demo:`, `random:`), trained here (`sft`), local, or
    downloaded from the hub; with `model.adapter`.

    Args:
        trains: False for what samples alone, also from quantised weights.
        trains_adapter: `model.adapter` is trained on; else it is merged.
        key: of the model, for messages.
        day: what chat templates write as today's date in a cold start; None: today.
    """
    quiet_libraries()
    if model.path == "sft":
        assert sft is not None  # the configuration was checked
        base = sft_model(sft, model.chat_template, say)
        return run_sft(sft, base, say, day=day) if train_first else base
    base = _named_model(model, seed, say, trains=trains, key=key)
    if model.adapter is None:
        return set_chat_template(base, model.chat_template)
    where, local = f"model.adapter = {model.adapter}", expanded(model.adapter)
    adapter = local.resolve() if local.is_dir() else download(model.adapter, None, "model.adapter")
    merged = apply_start_adapter(base, adapter, where, continued=trains_adapter)
    if not trains_adapter:
        say(f"{where}: merged into a copy of the weights, {merged}")
    return set_chat_template(merged, model.chat_template)


def starting_model(config: Config, run_dir: Path, say: Callable[[str], None]) -> Path:
    """Return the directory of the model with which the run of ``config`` in ``run_dir`` began. Trains none
    that a checkpoint of the run holds as a whole.
    """
    if config.sft is not None and is_supervised_run(run_dir):
        return sft_model(config.sft, config.model.chat_template, say)
    adapts = config.policy.lora is not None  # to weights that the checkpoint does not hold
    return resolve_model(
        config.model, config.sft, config.seed, say,
        train_first=adapts, trains_adapter=adapts, day=config.data.day,
    )  # fmt: skip


def sft_model(sft: SFTConfig, chat_template: str | None, say: Callable[[str], None]) -> Path:
    """Return the directory of `sft.model`, which supervised training starts from. ``chat_template``:
    `model.chat_template`.
    """
    base = _named_model(ModelConfig(path=sft.model), sft.seed, say, trains=True, key="sft.model")
    return set_chat_template(base, chat_template)


def set_chat_template(model_dir: Path, template: str | None) -> Path:
    """Return a directory with the files of ``model_dir`` and the chat template ``template``, cached, so that
    engines, rewards and exports read it like any other; None: ``model_dir`` itself.
    """
    if template is None:
        return model_dir

    def write(directory: Path) -> None:
        for entry in model_dir.iterdir():
            if not entry.name.startswith(("chat_template", "additional_chat_templates")):
                (directory / entry.name).symlink_to(entry.resolve())
        write_text(directory / "chat_template.jinja", template)

    decides = {"model": str(model_dir), "files": fingerprint(model_dir), "template": template}
    return cached(f"templated-{model_dir.name}", decides, write)


def _named_model(
    model: ModelConfig, seed: int, say: Callable[[str], None], *, trains: bool, key: str
) -> Path:
    """Return the directory that ``model`` names, downloaded or made where it is not there."""
    path, trusted = model.path, model.trust_remote_code
    where = f"{key} = {path}"

    def usable(directory: Path) -> Path:
        return usable_model(directory, where, say, trust_remote_code=trusted, trains=trains)

    if is_checkpoint(path):
        return usable(checkpoint_model(path, say, starting_model=partial(starting_model, say=say)))
    if path.startswith("demo:"):
        return cached_model(path.removeprefix("demo:"), seed=seed)
    if path.startswith("random:"):
        return usable(random_model(expanded(path.removeprefix("random:")), seed=seed))
    local = expanded(path)
    if local.is_dir():
        return usable(local.resolve())
    if local.is_file():
        what = "the directory that holds it with config.json"
        if local.suffix.lower() == ".gguf":
            what = describe_gguf(local)
        raise ValueError(f"{where}: a file; expected {what}")
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ValueError(
            f"{where}: no such directory{searched(path)}; expected a local model directory or a hub id "
            "owner/name"
        )
    return usable(download(path, model.revision, key))


def download(hub_id: str, revision: str | None, key: str) -> Path:
    """Return the directory of a hub model, as the configuration's ``key`` names it. Raises ValueError."""
    from huggingface_hub import snapshot_download  # slow to import, and only for models of the hub

    try:
        return Path(
            snapshot_download(hub_id, revision=revision, ignore_patterns=["*.bin", "*.pth", "*.gguf"])
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if failure := find_hub_failure():  # asked once: afterwards the library may be offline
            reason = f"{failure}, and the model is not in the cache"
        raise ValueError(
            f"{key} = {hub_id}: no such directory{searched(hub_id)}, and downloading it from the hub failed "
            f"({reason}); check the name, the network and HF_TOKEN"
        ) from error


def check_scoring(rewards: RewardsConfig, sampling: SamplingConfig) -> None:
    """Raise ValueError for a reward function or model that cannot be used; see `scoring_problems`."""
    refuse(scoring_problems(rewards, sampling))


def scoring_problems(
    rewards: RewardsConfig, sampling: SamplingConfig, pool: GraderPool | None = None
) -> Iterator[str]:
    """Yield a message for every reward that cannot be used. ``pool``: loads user functions; None: one of its
    own.
    """
    yield from combination_problems(rewards)
    yield from reward_problems(rewards, max_new_tokens=sampling.shortest, pool=pool)
    for model in rewards.models:
        try:
            check_model(model)
        except ValueError as error:
            yield str(error)


def load_tokenizer(model_dir: Path, trust_remote_code: bool) -> Any:
    """Load the model's tokenizer. Raises ValueError for any error while reading its files."""
    quiet_libraries()
    from transformers import AutoTokenizer  # slow to import

    with readable_model(model_dir, "tokenizer"):
        return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)


def load_prompts(
    sections: PromptSections,
    source: DataSourceConfig,
    rows: Sequence[DataRow],
    tokenizer: Any,
    say: Callable[[str], None],
) -> BuiltPrompts:
    """Turn the ``rows`` of ``source`` into prompts. Many rows' tokens, and what was said of them, are stored
    for the next start.
    """
    data = sections.data
    rows = DataRows.from_rows(rows)
    if data.environment_of(source) is not None:
        rows = rows.apart()  # an environment may ask equal problems in different words
    tasks = source_tasks(data, sections.environments, source, rows, tokenizer)
    prompt_format = replace(
        PromptFormat.from_config(data, source), thought_tags=sections.rewards.thought_tags
    )
    is_stored = tasks is None and len(rows) >= STORED_FROM
    key = _prompts_key(sections, rows, tokenizer) if is_stored else ""
    said: list[str] | None = None
    if key and (stored := load(key)) is not None:
        arrays, (kinds, warnings, said) = stored
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
    if said is None:
        said = list(_remarks(sections, source, rows, built))
        if key:
            arrays, names = encoded.stored()
            save(key, arrays, [list(map(astuple, names["thoughts"])), encoded.warnings, said])
    for remark in said:
        say(remark)
    return built


def _prompts_key(sections: PromptSections, rows: DataRows, tokenizer: Any) -> str:
    """Return a name of all that decides the tokens of ``rows`` and what is said of them; "": not known."""
    state = tokenizer_state(tokenizer, sections.data.day) if rows.key else None
    if state is None:
        return ""
    settings = [
        sections.data.model_dump(mode="json", exclude={"train", "eval", "order", "deduplicate", "overlap"}),
        sections.rewards.model_dump(mode="json"),
    ]
    return store_key(["prompts", rows.key, state, settings])


def _remarks(
    sections: PromptSections, source: DataSourceConfig, rows: DataRows, built: BuiltPrompts
) -> Iterator[str]:
    """Yield what to tell the user of the rows of a source."""
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
    unreadable, looked_at = find_unreadable(golds, sections.rewards)
    if unreadable:
        first = ", ".join(f"{rows.location(i)}: {rows[i].answer[:60]!r}" for i in unreadable[:3])
        yield (
            f"{name}: {len(unreadable)} of {looked_at} gold answers are not parsable mathematics and are "
            f"matched as text, e.g. {first}"
        )
