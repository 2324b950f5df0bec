"""The `sample` stage: sample and score completions of the training prompts, and keep the good ones.

    DIRECTORY/
      samples/part_00000.parquet   every sample of a chunk of prompts, written once all are scored
      sft.jsonl                    kept samples in the format of `sft.data`, written last
      report.json                  counts

A restart finds the finished parts and samples only the missing ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from grpo_dist.config import Config
from grpo_dist.data.order import step_prompts
from grpo_dist.data.readers import read_all
from grpo_dist.data.tasks import environment_problems
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.evaluation.sampling import Draw, EvaluationHandles, sample_chunks
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.rewards.checks import asked_columns
from grpo_dist.runs.models import load_tokenizer, resolve_model
from grpo_dist.runs.prepare import check_rendering, train_prompts
from grpo_dist.runs.start_checks import check_length
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.seeds import derived_seed
from grpo_dist.runtime.stage_log import stage
from grpo_dist.tools.evaluate.run import evaluation_workers
from grpo_dist.tools.recipe.rejection import Selection
from grpo_dist.types import Group, Prompt

SFT_FILE = "sft.jsonl"
_CHUNK = 512  # prompts sampled between two saves
_STAGE = -2  # for request seeds; training steps count from 0, evaluations use -1


def run_sampling(config: Config, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Fill ``directory`` and return the contents of its report.json.

    Raises UserError for invalid input, and when no sample is kept.
    """
    with as_user_errors():
        model_dir = resolve_model(
            config.model, config.sft, config.seed, say, trains=False, day=config.data.day
        )
        check_length(config.model, model_dir, config.max_length)
        tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
        check_rendering(config, tokenizer, say)
        problems = environment_problems(config.data, config.environments)
        sources = config.data.resolve_prompts(config.data.train)
        read = read_all(sources, own=problems, asked=asked_columns(config.rewards))
        prompts = list(train_prompts(config, read, tokenizer, say).prompts)
        chunks = _chunks(_draw_prompts(prompts, config.rejection.max_prompts, config.seed))
    sample_s = config.cluster.timeouts.sample_s
    draw = Draw.from_config(config.rejection, config.sampling, seed=config.seed, sample_s=sample_s)
    workers = evaluation_workers(config, model_dir)
    asyncio.run(_sample_missing(workers, draw, chunks, directory, say))
    selection = Selection(config.rejection, config.data, tokenizer)
    lines = [
        json.dumps(record, ensure_ascii=False) + "\n"
        for number, chunk in enumerate(chunks)
        for record in selection.take(read_groups(_part(directory, number), {p.uid: p for p in chunk}))
    ]
    report = selection.report.summary()
    write_text(directory / "report.json", json.dumps(report, indent=1) + "\n")
    if not lines:
        raise UserError(
            f"{directory}: none of {report['samples']} samples was kept ({_reasons(report)}); lower "
            f"`rejection.min_reward` = {config.rejection.min_reward:g}, sample more, or use a better model"
        )
    write_text(directory / SFT_FILE, "".join(lines))
    say(f"kept {report['kept']} of {report['samples']} samples; not kept: {_reasons(report) or 'none'}")
    return report


def _reasons(report: dict[str, Any]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in report["dropped"].items() if count)


def _draw_prompts(prompts: list[Prompt], wanted: int | None, seed: int) -> list[Prompt]:
    """Return ``wanted`` of the prompts, drawn by seed; None: all."""
    if wanted is None or wanted >= len(prompts):
        return prompts
    chosen = step_prompts(len(prompts), wanted, derived_seed(seed, "rejection prompts"), 0)
    return [prompts[i] for i in chosen]


def _chunks(prompts: list[Prompt]) -> list[list[Prompt]]:
    return [prompts[first : first + _CHUNK] for first in range(0, len(prompts), _CHUNK)]


def _part(directory: Path, number: int) -> Path:
    return directory / "samples" / f"part_{number:05d}.parquet"


async def _sample_missing(
    starting: AbstractAsyncContextManager[EvaluationHandles],
    draw: Draw,
    chunks: list[list[Prompt]],
    directory: Path,
    say: Callable[[str], None],
) -> None:
    """Sample every missing part. Start no engine when there is none."""
    missing = [i for i in range(len(chunks)) if not _part(directory, i).exists()]
    if not missing:
        return

    async def finished(number: int, groups: list[Group]) -> None:
        write_groups(_part(directory, number), groups)
        chunk = f"chunk {number + 1} of {len(chunks)}"
        samples = sum(len(g.rollouts) for g in groups)
        say(f"rejection sampling: {chunk}: {samples} samples of {len(groups)} prompts")

    left = {number: chunks[number] for number in missing}
    async with starting as workers:
        with stage("rejection sampling", f"{len(missing)} of {len(chunks)} chunks of prompts"):
            await sample_chunks(draw, workers, left, finished, stage=_STAGE, what="rejection sampling")
