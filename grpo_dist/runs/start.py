"""What `train` and `check` look at before anything starts: one list of checks.

`load_inputs`, of every run, stops at the first problem; `grpo-dist check` reports all, and adds what only
estimates a run or looks at this machine (`tools.check`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from grpo_dist.config import Config
from grpo_dist.config.presets import described
from grpo_dist.data.demonstrations import load_source
from grpo_dist.data.pools import pool_sizes
from grpo_dist.data.readers import SourceRows, read_all
from grpo_dist.data.tasks import environment_problems
from grpo_dist.rewards.checks import asked_columns
from grpo_dist.runs.cold_start import find_trained
from grpo_dist.runs.identity import shadowed
from grpo_dist.runs.prepare import (
    RunInputs,
    build_inputs,
    drop_duplicates,
    load_tokenizer,
    resolve_model,
)
from grpo_dist.runs.start_checks import model_problems, position_limit, setting_problems
from grpo_dist.runs.trials import CheckSkipped, Start, check_environments, check_reward, fail
from grpo_dist.runs.user_trials import user_code_problems
from grpo_dist.runtime.hardware import DeviceType, device_type
from grpo_dist.runtime.stage_log import stage

_SHOWN = 300  # characters of the first prompt, from its end


def check_settings(start: Start) -> str:
    """Find settings that ranks or engines refuse at their start, whatever the model."""
    fail(setting_problems(start.config, start.device))
    return described(start.config)


def check_user_code(start: Start) -> str:
    """Try the user's own pieces, and name packages that register names of built-in ones."""
    for warning in shadowed():
        start.say(f"warning: {warning}")
    pieces = start.config.user_components
    with stage("own code", "is tried on made inputs", quiet=not pieces):
        fail(user_code_problems(pieces, start.config.code_paths))
    return ", ".join(f"{piece.key}: {piece.name}" for piece in pieces)


def check_data(start: Start) -> str:
    """Read every source of `data.train` and `data.eval`. A mistake in a row shows before a download."""
    data, wrong = start.config.data, dict[str, None]()  # an environment that cannot be loaded is one mistake
    problems = environment_problems(data, start.config.environments)
    asked = asked_columns(start.config.rewards)
    read_sets: dict[str, list[SourceRows]] = {"data.train": [], "data.eval": []}
    with stage("data", "problems are read"):
        for (key, read_rows), sources in zip(read_sets.items(), (data.train, data.eval), strict=True):
            sources = data.resolve_prompts(sources)
            for number, source in enumerate(sources):
                try:
                    read_rows += read_all([source], key, problems, asked=asked, first=number)
                except (ValueError, OSError) as error:
                    wrong[str(error)] = None
    fail(wrong)
    train, held_out = read_sets.values()
    start.rows = (train, held_out)
    counts = [
        ", ".join(f"{len(rows)} of {source.label}" for source, rows in read_rows)
        for read_rows in start.rows
    ]
    return f"rows for training: {counts[0]}; held out: {counts[1] or 'none'}"


def check_model(start: Start) -> str:
    """Find, download or train the model, and name settings that it cannot have."""
    config = start.config
    cold = config.model.path == "sft" and start.train_first
    with stage("cold start" if cold else "model", "supervised, unless cached" if cold else config.model.path):
        model_dir = resolve_model(
            config.model, config.sft, config.seed, start.say,
            train_first=start.train_first, trains_adapter=config.policy.lora is not None,
            day=config.data.day,
        )  # fmt: skip
    with stage("model files", "are checked"):
        position_limit(config.model, model_dir)  # without a readable config.json all others skip the model
        start.model_dir = model_dir
        fail(model_problems(config, start.device, model_dir))
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
    fail(wrong)
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
    inputs = start.inputs = build_inputs(config, start.model_dir, *start.rows, start.say)
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


# In the order in which they are made: a check reads what those before it have read. "": nothing to report.
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
    """Return ``config`` with the steps of its `epochs`, if it has these. Raises ValueError for rows that
    cannot be read.
    """
    if config.epochs is None:
        return config
    data, per_step = config.data, config.batch.prompts_per_step
    problems = environment_problems(data, config.environments)
    asked = asked_columns(config.rewards)  # as `check_data` has it, which then finds the rows stored
    sources = read_all(data.resolve_prompts(data.train), "data.train", problems, asked=asked)
    rows = sum(len(rows) for _, rows in drop_duplicates(data, sources, "data.train", lambda _: None))
    steps = max(1, int(config.epochs * rows / per_step + 1e-9))
    say(f"`epochs` = {config.epochs:g} of {rows} rows, {per_step} a step: {steps} steps")
    return config.model_copy(update={"steps": steps, "epochs": None})


def load_inputs(
    config: Config, say: Callable[[str], None], *, train_first: bool = True, device: DeviceType | None = None
) -> RunInputs:
    """Load and check everything that needs neither accelerator nor actor. Raises ValueError with one message
    for input that cannot be used.

    Args:
        train_first: False skips a cold start: the model is then the one it would start from.
        device: of the run's workers; None: as on this machine.
    """
    start = Start(config, say, train_first, lambda: device or device_type())
    for check in CHECKS.values():
        with suppress(CheckSkipped):
            check(start)
    assert start.inputs is not None  # or a check would have failed
    start.inputs.warnings.extend(start.warnings)
    return start.inputs
