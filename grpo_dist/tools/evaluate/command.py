"""The command lines of `grpo-dist eval` and `grpo-dist score`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.processes import libraries_loaded
from grpo_dist.runtime.stage_log import print_line, stages_logged
from grpo_dist.tools.arguments import add_command, add_inputs, file_path, split_overrides


def add_commands(commands: Any) -> None:
    _add_eval(commands)
    _add_score(commands)


def _add_eval(commands: Any) -> None:
    text = (
        "measure a model on benchmarks or other data: pass@k, avg@n, maj@k, cons@k with intervals; "
        "rerunning the command resumes an interrupted evaluation and reuses finished problems"
    )
    sub = add_command(commands, "eval", text, _eval)
    add_inputs(
        sub,
        "model directory, hub id, run directory, RUN@latest or RUN@STEP for a checkpoint, or a configuration "
        "(YAML) with `model.path`",
        "gsm8k, math500, aime24, aime25, amc23 (files in the directory GRPO_DATA, else the hub), a data "
        "file, a data set directory or a hub id; default: `data.eval` of the configuration or run. E.g. "
        "evaluation.samples_per_prompt=8 evaluation.k=[1,8] sampling.max_new_tokens=4096",
        nargs="?",
        metavars=("MODEL", "DATA | key=value"),
        words=True,
    )
    sub.add_argument(
        "--output", type=file_path, metavar="DIR",
        help="directory for results and samples; default: one per model and settings in `output_dir`",
    )  # fmt: skip
    sub.add_argument(
        "--by", action="append", default=[], metavar="COLUMN",
        help="also report results by this column; default: source, difficulty, level, where present",
    )  # fmt: skip
    sub.add_argument(
        "--compare", nargs=2, type=file_path, metavar=("A", "B"),
        help="print the differences between two results (directories) with intervals; measure nothing",
    )  # fmt: skip


def _eval(
    target: str | None,
    rest: list[str],
    *,
    output: Path | None,
    by: list[str],
    compare: list[Path] | None,
) -> None:
    if (target is None) == (compare is None) or (compare and rest):
        raise UserError("eval: give either a model (and data) to measure, or --compare A B alone")
    if compare:
        from grpo_dist.tools.evaluate.compare import compare_results  # loads numpy

        compare_results(compare[0], compare[1], output)
        return
    data, overrides = split_overrides(rest)
    with stages_logged():
        with libraries_loaded():
            from grpo_dist.tools.evaluate.run import evaluate_model  # loads torch
            from grpo_dist.tools.evaluate.target import configuration

        config = configuration(str(target), data, overrides)
        evaluate_model(config, print_line, directory=output, by=by)


def _add_score(commands: Any) -> None:
    text = (
        "grade a file of completions with any rewards, in the same processes as a run: accuracy, the values "
        "of each reward, unscored completions and why, time per row, and where graders disagree"
    )
    sub = add_command(commands, "score", text, _score)
    add_inputs(
        sub,
        "data file with `problem`, `answer`, `completion` (or a list: `completions`) and any other columns, "
        "or samples of a run or an evaluation",
        "YAML file that gives `rewards` with weights and gates; overrides such as rewards.timeout_s=2",
        metavars=("COMPLETIONS", "CONFIG | key=value"),
        words=True,
    )
    sub.add_argument(
        "--reward", action="append", default=[], metavar="NAME",
        help="a built-in reward, or module:function (in code_paths=[DIR]); repeat to compare; default math",
    )  # fmt: skip
    sub.add_argument(
        "--label",
        metavar="COLUMN",
        help="true or false, from a person or another grader; compared with the rewards",
    )
    sub.add_argument("--completion-column", metavar="COLUMN", help="default: completion or completions")
    sub.add_argument("--answer-column", default="answer", metavar="COLUMN")
    sub.add_argument(
        "--output", type=file_path, metavar="FILE", help="default: COMPLETIONS.scored.jsonl in this directory"
    )


def _score(
    path: str,
    rest: list[str],
    *,
    reward: list[str],
    label: str | None,
    completion_column: str | None,
    answer_column: str,
    output: Path | None,
) -> None:
    files, overrides = split_overrides(rest)
    if len(files) > 1:
        raise UserError(f"score: {', '.join(files)}: expected at most one configuration")
    with stages_logged():
        with libraries_loaded():
            from grpo_dist.tools.evaluate.completions import Columns  # loads numpy and the rewards
            from grpo_dist.tools.evaluate.score import configuration, score

        file, columns = expanded(path), Columns(completion_column, answer_column, label)
        config = configuration(file, reward, files[0] if files else None, overrides)
        score(file, config, print_line, columns=columns, output=output)
