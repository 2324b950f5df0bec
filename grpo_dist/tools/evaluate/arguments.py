"""The command line of `grpo-dist eval`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.runtime.imports import libraries_loaded
from grpo_dist.runtime.stage_log import print_line, stages_logged
from grpo_dist.tools.arguments import add_command, add_inputs, file_path, split_overrides


def add_commands(commands: Any) -> None:
    text = (
        "measure a model on benchmarks or other data: pass@k, avg@k, maj@k, cons@k with intervals; "
        "rerunning the command resumes an interrupted evaluation and reuses finished problems"
    )
    sub = add_command(commands, "eval", text, _eval)
    add_inputs(
        sub,
        "model directory, hub id, run directory, or a configuration (YAML) with `model.path`",
        "gsm8k, math500, aime24, aime25, amc23, a JSONL or Parquet file, a data set directory or hub "
        "id; default: `data.eval` of the configuration or run. E.g. evaluation.samples_per_prompt=8 "
        "evaluation.k=[1,8] sampling.max_new_tokens=4096",
        nargs="?",
        metavars=("MODEL", "DATA | key=value"),
        words=True,
    )
    sub.add_argument(
        "--data-dir",
        type=file_path,
        metavar="DIR",
        help="directory of the benchmark files; default GRPO_DATA, else the hub",
    )
    sub.add_argument(
        "--output", type=file_path, metavar="DIR",
        help="directory of results and samples; default: one per model and settings in `output_dir`",
    )  # fmt: skip
    sub.add_argument(
        "--by", action="append", default=[], metavar="COLUMN",
        help="also report results by this column; default: source, difficulty, level, where present",
    )  # fmt: skip
    sub.add_argument(
        "--fresh", action="store_true", help="start over; an existing directory is kept as a backup"
    )
    sub.add_argument(
        "--compare", nargs=2, type=file_path, metavar=("A", "B"),
        help="print the differences between two results (directories) with intervals; measure nothing",
    )  # fmt: skip


def _eval(
    target: str | None,
    rest: list[str],
    *,
    data_dir: Path | None,
    output: Path | None,
    by: list[str],
    fresh: bool,
    compare: list[Path] | None,
) -> None:
    if (target is None) == (compare is None) or (compare and rest):
        raise UserError("eval: give either a model (and data) to measure, or --compare A B alone")
    if compare:
        from grpo_dist.tools.evaluate.run import compare_results  # loads numpy and torch

        compare_results(compare[0], compare[1], output)
        return
    data, overrides = split_overrides(rest)
    with stages_logged():
        with libraries_loaded():
            from grpo_dist.tools.evaluate.run import evaluate_target  # loads torch

        evaluate_target(
            str(target),
            data,
            overrides,
            print_line,
            data_dir=data_dir,
            directory=output,
            by=by,
            fresh=fresh,
        )
