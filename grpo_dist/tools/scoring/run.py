"""`grpo-dist score`: grade a file of completions as a run would, without engine or GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from grpo_dist.config import Config, ModelConfig, RewardsConfig, SFTConfig
from grpo_dist.config.files import load_config, validated, with_overrides
from grpo_dist.errors import UserError, refusals
from grpo_dist.rewards.data_columns import column_problems, own_column_problems
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import check_rewards, own_rewards
from grpo_dist.runs.directories import check_writable
from grpo_dist.runs.prepare import load_tokenizer, resolve_model
from grpo_dist.runtime.files import check_replaceable
from grpo_dist.runtime.hardware import available_cpus
from grpo_dist.runtime.stage_log import stage
from grpo_dist.runtime.tables import print_lines, wide_console
from grpo_dist.tools.scoring import report
from grpo_dist.tools.scoring.agreement import agreements, disagreements, is_grader
from grpo_dist.tools.scoring.rows import TABLE, Columns, CompletionRow, read_rows
from grpo_dist.tools.scoring.scorer import OF_TOKENS, Outcome, score_rows

_NO_MODEL = "no/model"  # model path of a configuration made for --reward


def score(
    path: Path,
    rewards: Sequence[str],
    config_file: str | None,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    columns: Columns,
    output: Path | None,
    show: int,
) -> Outcome:
    """Grade the completions in ``path``; print and write the scores.

    ``rewards`` are names; if empty, the rewards of ``config_file`` are used, or else the math grader.

    Raises UserError for an invalid row, reward or setting, before anything is graded.
    """
    config = configuration(path, rewards, config_file, overrides)
    target = output or Path(f"{path.stem}.scored.jsonl")
    if target.resolve() == path.resolve():
        raise UserError(f"--output {target} is the file of completions; name another")
    with stage("completions", quiet=True):
        rows = read_rows(path, columns)
    _check_sources(config.rewards, rows, columns)
    with refusals(), stage("rewards and tokenizer", quiet=True):
        _check_output(target)
        check_rewards(config.rewards, max_new_tokens=config.sampling.shortest)
        _check_columns(config.rewards, rows, path)
        tokenizer = _tokenizer(config.rewards, config.model, config.sft, config.seed, say)
    if config.rewards.models:
        names = ", ".join(model.name for model in config.rewards.models)
        say(f"warning: reward models are not run ({names}): the total excludes them")
    processes = min(
        config.rewards.num_workers * config.rewards.processes_per_worker, available_cpus(), len(rows)
    )
    with stage("scoring", quiet=True):
        outcome = score_rows(rows, config.rewards, config.sampling, tokenizer, processes=max(1, processes))
    with stage("report", quiet=True):
        _report(outcome, columns, target, show)
    return outcome


def configuration(
    path: Path, rewards: Sequence[str], config_file: str | None, overrides: Sequence[str]
) -> Config:
    """Build the configuration. Raises UserError for --reward with a file, and for invalid settings."""
    if rewards and config_file:
        raise UserError(f"--reward and {config_file}: both give rewards; give one of the two")
    if config_file:
        return load_config(config_file, overrides)
    functions = [{"function": name} for name in rewards or ["math"]]
    tree = OmegaConf.create(
        {
            "model": {"path": _NO_MODEL},
            # A reward of episodes needs an environment; those of the file have been played.
            "data": {
                "train": [{"path": str(path)}],
                "environment": "calculator" if "environment" in rewards else "none",
            },
            "rewards": {"functions": functions, "processes_per_worker": available_cpus()},
        }
    )
    return validated(with_overrides(tree, overrides, path), "score", Config)


def _check_output(target: Path) -> None:
    """Raise UserError unless ``target`` can be written; an existing file is replaced."""
    try:
        check_writable(target.absolute().parent)
    except ValueError as error:
        raise UserError(f"--output {target} cannot be written; name another file") from error
    if target.is_dir():
        raise UserError(f"--output {target} is a directory; name a file")
    check_replaceable(target)


def _check_sources(rewards: RewardsConfig, rows: Sequence[CompletionRow], columns: Columns) -> None:
    """Raise UserError where a row has no rewards that can be computed here."""
    for row in rows:
        if rewards.by_source and columns.source not in row.record:
            raise UserError(
                f"{row.location}: no column `{columns.source}`, which selects the rewards of the row "
                "(rewards.by_source); --source-column names another, rewards.by_source={} gives all rows "
                "those of rewards.functions"
            )
    for source in sorted({row.source for row in rows}):
        key = f"rewards.by_source.{source}" if source in rewards.by_source else "rewards"
        of = f" of source {source!r}" if rewards.by_source else ""
        _check_without_models(rewards.of(source), key, of)


def _check_columns(rewards: RewardsConfig, rows: Sequence[CompletionRow], path: Path) -> None:
    """Raise ValueError where a reward lacks a column in a row, or cannot read it."""
    remedy = (
        "a table of samples has no further columns of the data, so score a JSON Lines file that has it"
        if path.suffix == TABLE
        else "add it to the file"
    )
    by_source: dict[str, list[CompletionRow]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)

    def problems() -> Iterator[str]:
        for own in by_source.values():
            yield from column_problems(rewards, own, remedy)
        if not own_rewards(rewards):
            return
        with GraderPool(1, code_paths=rewards.code_paths) as pool:
            for own in by_source.values():
                yield from own_column_problems(rewards, own, remedy, pool)

    if (problem := next(problems(), None)) is not None:
        raise ValueError(problem)


def _check_without_models(rewards: RewardsConfig, key: str, of: str) -> None:
    """Raise UserError if rewards depend on reward models, which do not run: they need GPUs of engines.

    ``key``, ``of``: of the rewards and their rows, for messages.
    """
    models = [model.name for model in rewards.models]
    if not rewards.functions:
        why = f"reward models ({', '.join(models)}) are not run" if models else "nothing else scores rows"
        raise UserError(f"{key}.functions is empty, and {why}{of}")
    gated = next((r for r in rewards.functions if r.gate in models), None)
    if gated:
        raise UserError(
            f"reward {gated.name or gated.function}: its gate {gated.gate} is a reward model, which is not "
            "run; remove the gate, or the reward"
        )


def _tokenizer(
    rewards: RewardsConfig,
    model: ModelConfig,
    sft: SFTConfig | None,
    seed: int,
    say: Callable[[str], None],
) -> Any:
    """Return the policy's tokenizer if a reward needs tokens, else None."""
    token_rewards = [r.function for r in rewards.all_functions if r.function in OF_TOKENS]
    if not token_rewards:
        return None
    if model.path == _NO_MODEL:
        raise ValueError(
            f"reward {token_rewards[0]} counts tokens; set the model of the tokenizer, "
            "e.g. model.path=Qwen/Qwen2.5-0.5B-Instruct"
        )
    model_dir = resolve_model(model, sft, seed, say, train_first=False, trains=False)
    return load_tokenizer(model_dir, model.trust_remote_code)


def _report(outcome: Outcome, columns: Columns, target: Path, show: int) -> None:
    """Print tables, and write scores and disagreements to files."""
    console = wide_console()
    parts = outcome.parts()
    report.write_scores(target, outcome)
    report.print_scores(console, outcome, parts)
    print_lines(console, [f"scores: {target}"])
    graders = {name: part for name, part in parts.items() if is_grader(part)}
    if columns.label is not None:
        name = columns.label if columns.label not in parts else f"{columns.label} (label)"
        graders[name] = _labels([s.row for s in outcome.scored])
    if len(graders) < 2:
        return
    report.print_agreements(console, agreements(graders))
    if others := [name for name in parts if name not in graders]:
        console.print(f"not compared, as their values are not all 0 or 1: {', '.join(others)}", markup=False)
    file = target.with_name(f"{target.name.removesuffix('.jsonl')}.disagreements.jsonl")
    rows = report.write_disagreements(file, outcome, graders, disagreements(graders))
    report.print_disagreements(console, rows, show)
    print_lines(console, [f"disagreements: {len(rows)} in {file}"])


def _labels(rows: Sequence[CompletionRow]) -> np.ndarray:
    return np.array([label for row in rows for label in row.labels or ()])
