"""The command line of `grpo-dist score`. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.imports import libraries_loaded
from grpo_dist.runtime.stage_log import print_line, stages_logged
from grpo_dist.tools.arguments import add_command, add_inputs, file_path, split_overrides


def add_commands(commands: Any) -> None:
    text = (
        "grade a file of completions with any rewards, in the same processes as a run: distribution of the "
        "rewards, unscored completions and why, time per completion, and where graders disagree"
    )
    sub = add_command(commands, "score", text, _score)
    add_inputs(
        sub,
        "JSONL with `problem`, `answer`, `completion` (or a list: `completions`) and any other columns",
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
    sub.add_argument("--problem-column", default="problem", metavar="COLUMN")
    sub.add_argument("--completion-column", metavar="COLUMN", help="default: completion or completions")
    sub.add_argument("--answer-column", default="answer", metavar="COLUMN")
    sub.add_argument(
        "--source-column", default="source", metavar="COLUMN",
        help="name of the problem's source, for rewards.by_source; default source",
    )  # fmt: skip
    sub.add_argument(
        "--output", type=file_path, metavar="FILE", help="default: COMPLETIONS.scored.jsonl in this directory"
    )
    sub.add_argument(
        "--show", type=int, default=5, metavar="N", help="number of disagreements to print; default 5"
    )


def _score(path: str, rest: list[str], **options: Any) -> None:
    files, overrides = split_overrides(rest)
    if len(files) > 1:
        raise UserError(f"score: {', '.join(files)}: expected at most one configuration")
    with stages_logged():
        with libraries_loaded():
            # These load numpy and the rewards, which --help does not need.
            from grpo_dist.tools.scoring.rows import Columns
            from grpo_dist.tools.scoring.run import score

        columns = Columns(
            options["problem_column"],
            options["completion_column"],
            options["answer_column"],
            options["label"],
            options["source_column"],
        )
        score(
            expanded(path),
            options["reward"],
            files[0] if files else None,
            overrides,
            print_line,
            columns=columns,
            output=options["output"],
            show=options["show"],
        )
