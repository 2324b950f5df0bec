"""Loads and checks the teachers of a run: models, tokenizers, and the prompts that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.config import Config, DataConfig, DistillationConfig, ModelConfig, TeacherConfig
from grpo_dist.config.text import fill
from grpo_dist.data.columns import sources_of
from grpo_dist.data.prompts import PromptFormat
from grpo_dist.errors import refuse
from grpo_dist.policy.lora import empty_model
from grpo_dist.policy.model import check_supported, vocabulary_size
from grpo_dist.runs.models import load_tokenizer, resolve_model
from grpo_dist.runs.start_checks import position_limit, readable_model
from grpo_dist.types import Prompt


def key_of(teacher: TeacherConfig) -> str:
    """Return how a message names the teacher."""
    return f"distillation.teachers {teacher.name}"


def load_teachers(
    config: Config, prompts: Sequence[Prompt], policy: tuple[Path, Any], say: Callable[[str], None]
) -> tuple[Sequence[Prompt], dict[str, Path]]:
    """Return ``prompts`` with the teachers' versions of them, and the directories of the teachers' models by
    name. Raises ValueError with one message for teachers that cannot be used. ``policy``: the directory and
    the tokenizer of the policy's model.
    """
    distillation, model = config.distillation, config.model
    refuse(source_problems(distillation, prompts))
    directories = {t.name: _directory(config, t, say) for t in distillation.teachers_with_workers}
    tokenizers = {
        name: load_tokenizer(directory, model.trust_remote_code) for name, directory in directories.items()
    }
    prompts = add_teacher_prompts(distillation, config.data, prompts, policy[1])
    longest = config.sampling.longest
    refuse(teacher_problems(distillation.teachers, model, prompts, tokenizers, policy, directories, longest))
    if distillation.top_k:
        models = {"the policy": policy[0]} | {f"teacher {name}": path for name, path in directories.items()}
        refuse(_top_k_problems(distillation.top_k, models, trusted=model.trust_remote_code))
    return prompts, directories


def _directory(config: Config, teacher: TeacherConfig, say: Callable[[str], None]) -> Path:
    if teacher.model == "sft":
        raise ValueError(
            f"{key_of(teacher)}: `model` = sft is the policy's own cold start; use reference, which begins "
            "with its weights"
        )
    try:
        return resolve_model(teacher.model_section(config.model), None, config.seed, say, key="`model`")
    except ValueError as error:
        # `random:` names the policy's key in its own messages.
        raise ValueError(f"{key_of(teacher)}: {str(error).replace('model.path = ', '`model` = ')}") from error


def source_problems(distillation: DistillationConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a message for every source that a teacher names and the data lacks, and for sources from which
    nothing is learned.
    """
    teachers = distillation.teachers
    sources = sorted(set(sources_of(prompts) if teachers else ()))
    for teacher in teachers:
        if unknown := sorted(set(teacher.sources) - set(sources)):
            yield (
                f"{key_of(teacher)}: `sources` has {unknown[0]}, which no source of data.train is named; "
                f"expected {', '.join(sources)}"
            )
    idle = [source for source in sources if not any(teacher.teaches(source) for teacher in teachers)]
    if teachers and distillation.reward_coef == 0 and idle:
        yield (
            f"`distillation.reward_coef` = 0, and source {idle[0]} has no teacher, so nothing is learned "
            "from its samples; name it in `sources` of a teacher, raise `distillation.reward_coef`, or "
            "remove it from data.train"
        )


def add_teacher_prompts(
    distillation: DistillationConfig, data: DataConfig, prompts: Sequence[Prompt], tokenizer: Any
) -> Sequence[Prompt]:
    """Return ``prompts`` with the versions for teachers that have their own `prompt`.

    Raises ValueError if a teacher's prompt names a column that a problem lacks.
    """
    prompted = [(t, t.prompt) for t in distillation.teachers if t.prompt is not None]
    if not prompted:
        return prompts
    formats = PromptFormat.by_source(data)

    def encode_for(teacher: TeacherConfig, template: str, prompt: Prompt) -> np.ndarray:
        text = _fill_template(template, prompt, key_of(teacher))
        rendered = formats[prompt.source]
        return np.asarray(rendered.token_ids(text, tokenizer, prompt.messages), np.int32)

    return [
        replace(
            prompt,
            teacher_ids={
                t.name: encode_for(t, text, prompt) for t, text in prompted if t.teaches(prompt.source)
            },
        )
        for prompt in prompts
    ]


def _fill_template(template: str, prompt: Prompt, key: str) -> str:
    columns: Mapping[str, Any] = {**prompt.columns, "problem": prompt.text, "answer": prompt.answer}

    def value(name: str) -> str:
        if name not in columns:
            raise ValueError(
                f"{key}: `prompt` has {{{name}}}, and problem {prompt.uid} has no such column; expected one "
                f"of {', '.join(sorted(columns))}, and further columns in `data.train.*.columns`; "
                f"{{{{{name}}}}} is the text {{{name}}}"
            )
        return str(columns[name])

    return fill(template, value)


def teacher_problems(
    teachers: Sequence[TeacherConfig],
    model: ModelConfig,
    prompts: Sequence[Prompt],
    tokenizers: Mapping[str, Any],
    policy: tuple[Path, Any],
    directories: Mapping[str, Path],
    longest: int,
) -> Iterator[str]:
    """Yield a message for every teacher that cannot give log-probs of the policy's tokens. Reads no weights.

    Args:
        tokenizers: of teachers with their own model, by name, as ``directories``.
        policy: as `load_teachers` takes it.
        longest: longest trained completion, tokens.
    """
    model_dir, tokenizer = policy
    for teacher in teachers:
        settings = teacher.model_section(model) if teacher.has_workers else model
        directory = directories.get(teacher.name, model_dir)
        limit, taught = position_limit(settings, directory), [p for p in prompts if teacher.teaches(p.source)]
        size = max((len(_read_tokens(teacher, prompt)) for prompt in taught), default=0)
        if limit is not None and size + longest > limit:
            remedy = "lower data.max_prompt_tokens" if teacher.prompt is None else "shorten its `prompt`"
            yield (
                f"{key_of(teacher)}: it reads up to {size} tokens of a prompt and {longest} of a completion, "
                f"but {directory.name} takes at most {limit} positions (max_position_embeddings and rope "
                f"scaling in its config.json); {remedy}, or lower sampling.max_new_tokens"
            )
        if teacher.has_workers:
            yield from _foreign_tokens(teacher, tokenizers[teacher.name], tokenizer)
            yield from _unusable(teacher, model.trust_remote_code, directory, model_dir)


def _read_tokens(teacher: TeacherConfig, prompt: Prompt) -> np.ndarray:
    return prompt.teacher_ids.get(teacher.name, prompt.token_ids)


def _foreign_tokens(teacher: TeacherConfig, tokenizer: Any, policy_tokenizer: Any) -> Iterator[str]:
    """Compare the vocabularies: a token id must be the same text for both."""
    ids, expected = tokenizer.get_vocab(), policy_tokenizer.get_vocab()
    if ids == expected:
        return
    differ = sorted(token for token in ids.keys() | expected.keys() if ids.get(token) != expected.get(token))
    token = differ[0]
    yield (
        f"{key_of(teacher)}: `model` = {teacher.model} has another tokenizer than the policy: {len(differ)} "
        f"tokens differ, e.g. {token!r} is {_id(ids, token)} there and {_id(expected, token)} here; its "
        "log-probs would belong to other text. Use a teacher with the policy's vocabulary"
    )


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"


def _top_k_problems(top_k: int, models: Mapping[str, Path], *, trusted: bool) -> Iterator[str]:
    for name, directory in models.items():
        with readable_model(directory, "configuration"):
            tokens = vocabulary_size(directory, trust_remote_code=trusted)
        if top_k > tokens:
            yield (
                f"distillation.kl.k = {top_k}, but {name} has {tokens} tokens; use at most as many, which "
                "compares whole distributions"
            )


def _unusable(teacher: TeacherConfig, trusted: bool, directory: Path, model_dir: Path) -> Iterator[str]:
    if trusted:  # a model's remote code may need weights to run
        return
    with readable_model(directory, "architecture"):
        model = empty_model(directory, trust_remote_code=False)
    with readable_model(model_dir, "architecture"):
        policy = empty_model(model_dir, trust_remote_code=False)
    try:
        check_supported(model, str(directory))
    except ValueError as error:
        yield f"{key_of(teacher)}: {error}"
    rows, needed = _vocabulary(model), _vocabulary(policy)
    if rows < needed:
        yield (
            f"{key_of(teacher)}: `model` = {teacher.model} has {rows} token embeddings and the policy "
            f"{needed}, so a token that the policy samples may be none of the teacher's; use a teacher with "
            "at least as many"
        )


def _vocabulary(model: Any) -> int:
    size: int = model.get_input_embeddings().num_embeddings
    return size
