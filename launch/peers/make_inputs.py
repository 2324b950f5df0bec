"""Writes a peer trainer's inputs for the same work as `grpo-dist bench CONFIG`: the model, each step's
prompts and completion lengths. A script in the peer's environment reads the directory.

    .venv/bin/python launch/peers/make_inputs.py configs/bench/cpu_13m.yaml inputs/fixed --steps 12

    inputs/fixed/model/         Hugging Face files with the run's initial weights
    inputs/fixed/work.json      token ids of prompts, and tokens of their completions, one list per prompt:
                                {"cap": 128, "samples": 8, "steps": [
                                    {"prompts": [[4, 26, ...], ...], "lengths": [[128, 128, ...], ...]}, ...]}
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from grpo_dist.config import Config, DataConfig
from grpo_dist.config.files import load_config
from grpo_dist.data.order import step_prompts
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.runs.start import load_inputs
from grpo_dist.runtime.seeds import request_seed
from grpo_dist.tools.bench.lengths import lengths_of
from grpo_dist.types import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, required=True, help="warm-up and timed steps together")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of grpo-dist bench")
    args = parser.parse_intermixed_args()
    with as_user_errors():
        config = load_config(args.config, args.overrides)
        if config.bench.lengths.kind == "natural":
            raise ValueError(
                "bench.lengths.kind = natural: two trainers' models would not end at the same lengths; "
                "use fixed or lognormal"
            )
        _check_order(config.data)
        inputs = load_inputs(config, print)
    shutil.copytree(inputs.model_dir, args.directory / "model", dirs_exist_ok=True)
    work = {
        "cap": config.sampling.longest,
        "samples": config.batch.samples_per_prompt,
        "steps": [_step(config, inputs.prompts, step) for step in range(args.steps)],
    }
    (args.directory / "work.json").write_text(json.dumps(work))


def _check_order(data: DataConfig) -> None:
    """Raise ValueError for a prompt order that depends on samples or sources."""
    if data.order.name != "epochs":
        raise ValueError(
            f"data.order = {data.order.name}: the peer takes the prompts of each step as written, before "
            "anything is sampled; use epochs"
        )
    if weighted := next((source for source in data.train if source.weight is not None), None):
        raise ValueError(
            f"data.train: weight = {weighted.weight:g}: the peer gets prompts in the order of epochs; remove "
            "the weights"
        )


def _step(config: Config, prompts: list[Prompt], step: int) -> dict[str, list[list[int]]]:
    """Return the prompts that the pipeline draws for ``step``, and the lengths given by the seeds."""
    order = step_prompts(len(prompts), config.batch.prompts_per_step, config.seed, step)
    chosen = [prompts[i] for i in order]
    return {
        "prompts": [prompt.token_ids.tolist() for prompt in chosen],
        "lengths": [_lengths(config, prompt.uid, step) for prompt in chosen],
    }


def _lengths(config: Config, uid: str, step: int) -> list[int]:
    seeds = [request_seed(config.seed, step, uid, i) for i in range(config.batch.samples_per_prompt)]
    return list(lengths_of(seeds, config.bench.lengths, cap=config.sampling.longest, uid=uid) or ())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
