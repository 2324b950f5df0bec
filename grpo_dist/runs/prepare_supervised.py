"""Loads and checks what supervised training on the policy's ranks needs before any actor starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_dist.config import Config, SupervisedConfig
from grpo_dist.data.columns import column
from grpo_dist.data.demonstrations import (
    Demonstration,
    count_held_out,
    count_rows,
    load_demonstrations,
    split,
)
from grpo_dist.errors import refuse
from grpo_dist.runs.identity import DataOrigin
from grpo_dist.runs.prepare import RunInputs, load_tokenizer, sft_model
from grpo_dist.runs.start_checks import model_problems, setting_problems
from grpo_dist.runtime.hardware import DeviceType, device_type
from grpo_dist.runtime.stage_log import stage


@dataclass(frozen=True)
class SupervisedInputs(RunInputs):
    """``prompts``: the demonstrations. ``held_out``: those of the validation loss."""

    prompts: Sequence[Demonstration]
    held_out: Sequence[Demonstration] = ()


def supervised(config: Config, symbolic: Config) -> tuple[SupervisedConfig, SupervisedConfig]:
    """Return the supervised training of ``config``, and that of ``symbolic``, its identity.

    With `sft.epochs`, the rows are counted, which gives the number of steps. Raises ValueError for rows that
    cannot be used, and ConfigError for settings that contradict each other.
    """
    sft = config.sft
    assert sft is not None
    steps = sft.steps
    if sft.epochs is not None:
        rows = count_rows(sft)
        steps = sft.steps_for(rows - count_held_out(sft, rows))
    return SupervisedConfig.from_config(config, steps=steps), SupervisedConfig.from_config(
        symbolic, steps=steps
    )


def load_supervised_inputs(
    config: Config, say: Callable[[str], None], *, device: DeviceType | None = None
) -> SupervisedInputs:
    """Load and check model and demonstrations. Raises ValueError with one message for input that cannot be
    used. ``device``: of the ranks; None: as on this machine.
    """
    sft, device = config.sft, device or device_type()
    assert sft is not None
    refuse(setting_problems(config, device))
    with stage("model", sft.model):
        model_dir = sft_model(sft, config.model.chat_template, say)
    with stage("model files", "are checked"):
        refuse(model_problems(config, device, model_dir))
    with stage("tokenizer", "is loaded"):
        tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
    with stage("demonstrations", "are tokenized"):
        rows = load_demonstrations(sft, tokenizer, day=config.data.day, say=say)
        trained, held_out = split(rows, sft)
    say(
        f"{len(trained)} demonstrations, {config.steps} steps of {sft.batch_size}"
        + (f"; {len(held_out)} more for the validation loss" if held_out else "")
    )
    origin = DataOrigin.from_rows(column(trained, "row_uid"), tokenizer, model_dir, config.data)
    return SupervisedInputs(model_dir, trained, [], held_out=held_out, origin=origin)
