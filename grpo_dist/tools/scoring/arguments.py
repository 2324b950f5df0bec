"""The command line of `grpo-dist score`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError


def add_commands(commands: Any) -> None:
    text = (
        "grade a file of completions with any rewards, in processes as those of a run: how the rewards are "
        "distributed, what cannot be scored and why, how long it takes, and where graders disagree"
    )
    sub = commands.add_parser("score", help=text, description=text)
    sub.add_argument(
        "config", metavar="COMPLETIONS",
        help="JSONL with `problem`, `answer`, `completion` (or a list: `completions`) and any other columns",
    )  # fmt: skip
    sub.add_argument(
        "overrides", nargs="*", metavar="CONFIG | key=value",
        help="YAML file whose `rewards` are used, with weights and gates; rewards.timeout_s=2 and the like",
    )  # fmt: skip
    sub.add_argument(
        "--reward", action="append", default=[], metavar="NAME",
        help="a built-in reward, or module:function (in rewards.code_paths=[DIR]); several are compared; "
        "default math",
    )  # fmt: skip
    sub.add_argument(
        "--label", metavar="COLUMN", help="true or false by a person or another grader; compared, too"
    )
    sub.add_argument("--problem-column", default="problem", metavar="COLUMN")
    sub.add_argument("--completion-column", metavar="COLUMN", help="default: completion or completions")
    sub.add_argument("--answer-column", default="answer", metavar="COLUMN")
    sub.add_argument("--output", type=Path, metavar="FILE", help="default: COMPLETIONS.scored.jsonl, here")
    sub.add_argument("--show", type=int, default=5, metavar="N", help="disagreements shown; default 5")
    sub.set_defaults(command=_score)


def _score(path: str, rest: list[str], **options: Any) -> None:
    from grpo_dist.config.files import is_override

    overrides = [text for text in rest if is_override(text)]
    files = [text for text in rest if text not in overrides]
    if len(files) > 1:
        raise UserError(f"score: {', '.join(files)}: expected one configuration at most")
    from grpo_dist.tools.scoring.rows import Columns
    from grpo_dist.tools.scoring.run import score

    columns = Columns(
        options["problem_column"], options["completion_column"], options["answer_column"], options["label"]
    )
    score(
        Path(path).expanduser(),
        options["reward"],
        files[0] if files else None,
        overrides,
        lambda message: print(message, flush=True),
        columns=columns,
        output=options["output"],
        show=options["show"],
    )
