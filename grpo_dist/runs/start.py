"""The checks of `train` and `check` before anything starts, in one list.

`load_inputs`, of every run, stops at the first problem; `grpo-dist check` reports all, and adds estimates and
checks of this machine (`tools.check`). `load_supervised_inputs` is for supervised training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from grpo_dist.config import Config, SupervisedConfig
from grpo_dist.config.checks import contradictions
from grpo_dist.config.presets import described
from grpo_dist.data.columns import column
from grpo_dist.data.demonstrations import (
    Demonstration,
    count_held_out,
    count_rows,
    load_demonstrations,
    load_source,
    split,
)
from grpo_dist.data.pools import pool_sizes
from grpo_dist.data.readers import SourceRows, read_all
from grpo_dist.data.tasks import environment_problems
from grpo_dist.errors import refuse
from grpo_dist.rewards.checks import asked_columns
from grpo_dist.runs.cold_start import find_trained
from grpo_dist.runs.identity import DataOrigin
from grpo_dist.runs.models import load_tokenizer, resolve_model, sft_model
from grpo_dist.runs.prepare import RunInputs, build_inputs, drop_duplicates
from grpo_dist.runs.start_checks import model_problems, position_limit, setting_problems
from grpo_dist.runs.trials import (
    CheckSkipped,
    Start,
    check_environments,
    check_reward,
    user_code_problems,
    weight_problems,
)
from grpo_dist.runtime.hardware import DeviceType, device_type
from grpo_dist.runtime.stage_log import stage

_SHOWN = 300  # characters of the first prompt, from its end


def check_settings(start: Start) -> str:
    """Find settings that ranks or engines refuse at their start with any model."""
    refuse(setting_problems(start.config, start.device))
    return described(start.config)


def check_user_code(start: Start) -> str:
    """Try the user-supplied components."""
    components = start.config.user_components
    with stage("own code", "is tried on test inputs", quiet=not components):
        refuse(user_code_problems(components, start.config.code_paths))
        refuse(weight_problems(start.config))
    return ", ".join(f"{component.key}: {component.name}" for component in components)


def check_data(start: Start) -> str:
    """Read every source of `data.train` and `data.eval`. A mistake in a row shows before a download."""
    data, wrong = start.config.data, dict[str, None]()  # an environment that cannot be loaded is one mistake
    problems = environment_problems(data, start.config.environments)
    columns = asked_columns(start.config.rewards)
    read_sets: dict[str, list[SourceRows]] = {"data.train": [], "data.eval": []}
    with stage("data", "problems are read"):
        for (key, read_rows), sources in zip(read_sets.items(), (data.train, data.eval), strict=True):
            sources = data.resolve_prompts(sources)
            for number, source in enumerate(sources):
                try:
                    read_rows += read_all([source], key, problems, asked=columns, first=number)
                except (ValueError, OSError) as error:
                    wrong[str(error)] = None
    refuse(wrong)
    train, held_out = read_sets.values()
    start.rows = (train, held_out)
    counts = [
        ", ".join(f"{len(rows)} of {source.label}" for source, rows in read_rows) for read_rows in start.rows
    ]
    return f"rows for training: {counts[0]}; held out: {counts[1] or 'none'}"


def check_model(start: Start) -> str:
    """Find, download or train the model, and report settings that it does not support."""
    config = start.config
    cold = config.model.path == "sft" and start.train_first
    with stage("cold start" if cold else "model", "supervised, unless cached" if cold else config.model.path):
        model_dir = resolve_model(
            config.model, config.sft, config.seed, start.say,
            train_first=start.train_first, trains_adapter=config.policy.lora is not None,
            day=config.data.day,
        )  # fmt: skip
    with stage("model files", "are checked"):
        position_limit(config.model, model_dir)  # without a readable config.json other checks skip the model
        start.model_dir = model_dir
        refuse(model_problems(config, start.device, model_dir))
    return str(model_dir)


def check_cold_start(start: Start) -> str:
    """Read and tokenise the demonstrations of a cold start that is still to be trained."""
    sft = start.config.sft
    if sft is None or start.config.model.path != "sft" or start.train_first:
        return ""
    if start.model_dir is None:
        raise CheckSkipped("the model cannot be read")
    tokenizer = load_tokenizer(start.model_dir, False)
    with suppress(ValueError, OSError):  # data that cannot be read is found below
        if trained := find_trained(sft, start.model_dir, tokenizer, day=start.config.data.day):
            start.is_cold_started = True
            return f"its model is there: {trained}"
    tables, wrong = [], []
    for source in sft.data:
        try:
            tables.append(load_source(source, sft, tokenizer, day=start.config.data.day, say=start.say))
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    refuse(wrong)
    start.longest_demonstration = longest = max(int(table.lengths.max()) for table in tables)
    count = sum(map(len, tables))
    return (
        f"{count} demonstrations of up to {longest} tokens; {sft.steps_for(count)} steps of {sft.batch_size}"
    )


def check_prompts(start: Start) -> str:
    """Prepare the prompts, and show the end of the first one as the model sees it."""
    if start.rows is None or start.model_dir is None:
        raise CheckSkipped(f"the {'data' if start.rows is None else 'model'} cannot be read")
    config = start.config
    with stage("tokenizer", "is loaded"):
        tokenizer = load_tokenizer(start.model_dir, config.model.trust_remote_code)
    refuse(user_code_problems(config.rollout.user_components, config.code_paths, tokenizer))
    inputs = start.inputs = build_inputs(config, start.model_dir, tokenizer, *start.rows, start.say)
    if (by := config.data.pools_by) is not None:
        sizes = pool_sizes(inputs.prompts, by)
        start.say("pools: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
    first = inputs.prompts[0]
    text = inputs.tokenizer.decode(first.token_ids)
    dots = "..." if len(text) > _SHOWN else ""
    lines = [
        f"{len(inputs.prompts)} prompts, {sum(len(s.prompts) for s in inputs.eval_sets)} held out",
        f"the end of the first prompt ({len(first.token_ids)} tokens), whose answer is {first.answer!r}:",
        *(f"  | {line}" for line in (dots + text[-_SHOWN:]).splitlines()),
    ]
    return "\n    ".join(lines)


# In order: each check reads the results of the checks before it. "": nothing to report.
CHECKS: dict[str, Callable[[Start], str]] = {
    "settings": check_settings,
    "own code": check_user_code,
    "data": check_data,
    "model": check_model,
    "cold start": check_cold_start,
    "prompts": check_prompts,
    "environments": check_environments,
    "reward": check_reward,
}


def resolve_steps(config: Config, say: Callable[[str], None]) -> Config:
    """Return ``config`` with `steps` computed from `epochs`, if set. Raises Refused for settings that
    contradict this number, and another ValueError for unreadable rows.
    """
    if config.epochs is None:
        return config
    data, per_step = config.data, config.batch.prompts_per_step
    problems = environment_problems(data, config.environments)
    columns = asked_columns(config.rewards)  # as in `check_data`, which then finds the rows cached
    sources = read_all(data.resolve_prompts(data.train), "data.train", problems, asked=columns)
    rows = sum(len(rows) for _, rows in drop_duplicates(data, sources, "data.train", lambda _: None))
    steps = max(1, int(config.epochs * rows / per_step + 1e-9))
    say(f"`epochs` = {config.epochs:g} of {rows} rows, {per_step} a step: {steps} steps")
    config = config.model_copy(update={"steps": steps, "epochs": None})
    refuse(contradictions(config))
    return config


def load_inputs(
    config: Config, say: Callable[[str], None], *, train_first: bool = True, device: DeviceType | None = None
) -> RunInputs:
    """Load and check everything that needs neither accelerator nor actor. Raises ValueError with one message
    for input that cannot be used.

    Args:
        train_first: False skips a cold start: the model is the one that it would start from.
        device: of the run's workers; None: as on this machine.
    """
    start = Start(config, say, train_first, device)
    for check in CHECKS.values():
        with suppress(CheckSkipped):
            check(start)
    assert start.inputs is not None  # otherwise a check would have failed
    start.inputs.warnings.extend(start.warnings)
    return start.inputs


@dataclass(frozen=True)
class SupervisedInputs(RunInputs):
    """``prompts``: the demonstrations. ``held_out``: demonstrations for the validation loss."""

    prompts: Sequence[Demonstration]
    held_out: Sequence[Demonstration] = ()


def supervised(config: Config, symbolic: Config) -> tuple[SupervisedConfig, SupervisedConfig]:
    """Return the supervised training of ``config``, and of ``symbolic``, its identity.

    With `sft.epochs`, counts the rows to compute the number of steps. Raises ValueError for rows that
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
