"""The command line of `grpo-dist eval`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError


def add_commands(commands: Any) -> None:
    text = (
        "measure a model on benchmarks or other data: pass@k, avg@k, maj@k, cons@k with intervals; the "
        "same command again goes on where it was, or answers from what it kept"
    )
    sub = commands.add_parser("eval", help=text, description=text)
    sub.add_argument(
        "config", nargs="?", metavar="MODEL",
        help="model directory, hub id, run directory, or a configuration (YAML), whose `model.path` it is",
    )  # fmt: skip
    sub.add_argument(
        "overrides", nargs="*", metavar="DATA | key=value",
        help="gsm8k, math500, aime24, aime25, amc23, a JSONL or Parquet file, a data set directory or hub "
        "id; none: `data.eval` of the configuration or run. E.g. evaluation.samples_per_prompt=8 "
        "evaluation.k=[1,8] sampling.max_new_tokens=4096",
    )  # fmt: skip
    sub.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where benchmarks are; default GRPO_DATA, else the hub"
    )
    sub.add_argument(
        "--output", type=Path, metavar="DIR",
        help="of results and samples; default: one in `output_dir` for each model and settings",
    )  # fmt: skip
    sub.add_argument(
        "--by", action="append", default=[], metavar="COLUMN",
        help="results by this column, too; default: source, difficulty, level where a data set has them",
    )  # fmt: skip
    sub.add_argument("--fresh", action="store_true", help="begin anew; what was there is moved aside")
    sub.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"),
        help="print the differences of two results (directories) and how sure they are; measure nothing",
    )  # fmt: skip
    sub.set_defaults(command=_eval)


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
        from grpo_dist.tools.evaluate.run import compare_results

        compare_results(compare[0], compare[1], output)
        return
    from grpo_dist.config.files import is_override
    from grpo_dist.tools.evaluate.run import evaluate_target

    overrides = [text for text in rest if is_override(text)]
    evaluate_target(
        str(target),
        [text for text in rest if text not in overrides],
        overrides,
        lambda message: print(message, flush=True),
        data_dir=data_dir,
        directory=output,
        by=by,
        fresh=fresh,
    )
