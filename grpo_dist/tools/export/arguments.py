"""The command line of `grpo-dist export`. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.runtime.processes import libraries_loaded
from grpo_dist.runtime.stage_log import print_line, stages_logged
from grpo_dist.tools.arguments import add_command, file_path


def add_export(commands: Any) -> None:
    text = (
        "write a checkpoint of a running, stopped or finished run as a Hugging Face directory: weights, "
        "tokenizer, generation config and model card; starts no engine and no Ray"
    )
    sub = add_command(commands, "export", text, _export, overrides=[], takes="runs")
    sub.add_argument(
        "config",
        nargs=1,
        metavar="RUN",
        help="run directory, e.g. runs/demo, for its newest checkpoint, or RUN@STEP",
    )
    sub.add_argument(
        "--out", type=file_path, metavar="DIR", help="new or empty directory; default RUN/export/step_000020"
    )
    sub.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="type of the weights; default: as they were trained"
    )
    sub.add_argument(
        "--adapter",
        action="store_true",
        help="write only the adapter of a LoRA run, for peft and vLLM; default: merged",
    )
    sub.add_argument(
        "--push", metavar="USER/REPO",
        help="also upload it to this model repository of the hub, created private if it is new; HF_TOKEN or "
        "`hf auth login` gives the token",
    )  # fmt: skip


def _export(runs: list[str], overrides: list[str], **options: Any) -> None:
    if overrides or len(runs) > 1:
        raise UserError(f"{(overrides or runs[1:])[0]}: export takes one run directory and no settings")
    with stages_logged():
        with libraries_loaded():
            from grpo_dist.tools.export.export import export  # loads torch

        export(runs[0], print_line, **options)
