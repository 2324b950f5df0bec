"""The `sample` stage: completions of the training prompts by the stage's model, scored, the good ones kept.

    DIRECTORY/
      samples/part_00000.parquet   every sample of a chunk of prompts, written when all of them are scored
      sft.jsonl                    what is kept, as `sft.data` reads it; there when all is done
      report.json                  counts

A start finds the parts of the one before it and samples only what is missing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_dist.config import Config
from grpo_dist.data.order import step_prompts
from grpo_dist.data.readers import read_all
from grpo_dist.errors import UserError, refusals
from grpo_dist.evaluation.sampling import sample_chunks
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.runs.prepare import load_tokenizer, resolve_model, train_prompts
from grpo_dist.runs.start_checks import check_length
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.seeds import derived_seed
from grpo_dist.runtime.stage_log import stage
from grpo_dist.tools.recipe.rejection import Selection
from grpo_dist.types import Group, Prompt

SFT_FILE = "sft.jsonl"
_STAGE = -2  # of request seeds: those of training steps count from 0, evaluations have -1


def run_sampling(config: Config, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Fill ``directory``; the contents of its report.json.

    Raises UserError for input that cannot be used, and where nothing can be kept: there is nothing to teach.
    """
    with refusals():
        model_dir = resolve_model(config, say)
        check_length(config, model_dir)
        tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
        chunks = _chunks(config, _prompts(config, tokenizer, say))
    asyncio.run(_sample_missing(config, model_dir, chunks, directory, say))
    selection = Selection(config.rejection, config.data, tokenizer, seed=config.seed)
    lines = [
        json.dumps(record, ensure_ascii=False) + "\n"
        for number, chunk in enumerate(chunks)
        for record in selection.take(read_groups(_part(directory, number), {p.uid: p for p in chunk}))
    ]
    report = selection.report.summary()
    write_text(directory / "report.json", json.dumps(report, indent=1) + "\n")
    if not lines:
        raise UserError(
            f"{directory}: none of {report['samples']} samples is kept ({_reasons(report)}); lower "
            f"`rejection.min_reward` = {config.rejection.min_reward:g}, sample more, or use a better model"
        )
    write_text(directory / SFT_FILE, "".join(lines))
    say(f"kept {report['kept']} of {report['samples']} samples; not kept: {_reasons(report) or 'none'}")
    return report


def _reasons(report: dict[str, Any]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in report["dropped"].items() if count)


def _prompts(config: Config, tokenizer: Any, say: Callable[[str], None]) -> list[Prompt]:
    """All prompts of `data.train`, or as many of them as `rejection.max_prompts` says, drawn by seed."""
    found = train_prompts(config, read_all(config.data.train), tokenizer, say).prompts
    wanted = config.rejection.max_prompts
    if wanted is None or wanted >= len(found):
        return found
    drawn = step_prompts(len(found), wanted, derived_seed(config.seed, "rejection prompts"), 0)
    return [found[i] for i in drawn]


def _chunks(config: Config, prompts: list[Prompt]) -> list[list[Prompt]]:
    size = config.rejection.chunk_prompts
    return [prompts[first : first + size] for first in range(0, len(prompts), size)]


def _part(directory: Path, number: int) -> Path:
    return directory / "samples" / f"part_{number:05d}.parquet"


async def _sample_missing(
    config: Config, model_dir: Path, chunks: list[list[Prompt]], directory: Path, say: Callable[[str], None]
) -> None:
    """Every part that is not there yet. No engine is started when all are."""
    from actors.cluster import Cluster

    missing = [i for i in range(len(chunks)) if not _part(directory, i).exists()]
    if not missing:
        return

    async def finished(number: int, groups: list[Group]) -> None:
        write_groups(_part(directory, number), groups)
        of = f"chunk {number + 1} of {len(chunks)}"
        samples = sum(len(g.rollouts) for g in groups)
        say(f"rejection sampling: {of}: {samples} samples of {len(groups)} prompts")

    async with Cluster(config) as cluster:
        async with deadline(config.cluster.timeouts.up_s, "start: engine and graders up"):
            workers = await cluster.start_evaluation(model_dir)
        with stage("rejection sampling", f"{len(missing)} of {len(chunks)} chunks of prompts"):
            await sample_chunks(
                config,
                config.rejection,
                workers,
                {number: chunks[number] for number in missing},
                finished,
                stage=_STAGE,
                what="rejection sampling",
            )
