"""Checks of the data, the model's files, and the prompts and demonstrations made from both."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.data.demonstrations import source_pairs
from grpo_dist.data.pools import pool_sizes
from grpo_dist.data.readers import read, source_name
from grpo_dist.data.tasks import own_problems
from grpo_dist.runs.prepare import Prepared, load_tokenizer, prepared, resolve_model
from grpo_dist.runs.start_checks import model_problems, position_limit
from grpo_dist.tools.check.inputs import (
    CheckedRun,
    CheckSkipped,
    NotApplicable,
    ReadInput,
    SourceRows,
    TrainAndEvalRows,
    fail,
)
from grpo_dist.tools.plan.cold_start import is_trained_first

_SHOWN = 300  # characters of the first prompt, from its end


def check_data(target: CheckedRun) -> ReadInput[TrainAndEvalRows]:
    """Read every source of `data.train` and `data.eval`."""
    data, wrong = target.config.data, []
    own = own_problems(data, target.config.environments)
    read_sets: list[list[SourceRows]] = []
    for sources in (data.train, data.eval):
        found: list[SourceRows] = []
        read_sets.append(found)
        for source in sources:
            try:
                found.append((source, read(source, own)))
            except (ValueError, OSError) as error:
                wrong.append(str(error))
    fail(dict.fromkeys(wrong))  # an environment that cannot be loaded is one mistake
    counts = [", ".join(f"{len(rows)} of {source_name(s)}" for s, rows in own) or "none" for own in read_sets]
    return ReadInput(f"rows for training: {counts[0]}; held out: {counts[1]}", (read_sets[0], read_sets[1]))


def check_model(target: CheckedRun) -> ReadInput[Path]:
    """Find the model's files, and settings that it cannot have."""
    config, notes = target.config, list[str]()
    model_dir = resolve_model(config.model, config.sft, config.seed, notes.append, train_first=False)
    position_limit(config.model, model_dir)  # without a readable config.json all other checks skip the model
    problems = tuple(model_problems(config, target.device, model_dir))
    return ReadInput("\n    ".join([str(model_dir), *notes]), model_dir, problems)


def check_cold_start(target: CheckedRun, model_dir: Path | None) -> ReadInput[int]:
    """Read and tokenise the demonstrations, as `sft` does. The value is the length of the longest, tokens."""
    config, sft = target.config, target.config.sft
    if sft is None or not is_trained_first(config.model, config.sft):
        raise NotApplicable
    if model_dir is None:
        raise CheckSkipped("the model cannot be read")
    tokenizer = load_tokenizer(model_dir, False)
    pairs, wrong = [], []
    for source in sft.data:
        try:
            pairs += source_pairs(source, sft, tokenizer)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    fail(wrong)
    longest = max(map(len, pairs))
    return ReadInput(
        f"{len(pairs)} demonstrations of up to {longest} tokens; "
        f"{sft.steps_for(len(pairs))} steps of {sft.batch_size}",
        longest,
    )


def check_prompts(
    target: CheckedRun, rows: TrainAndEvalRows | None, model_dir: Path | None
) -> ReadInput[Prepared]:
    """Prepare the prompts, and show the end of the first one as the model sees it."""
    if rows is None or model_dir is None:
        raise CheckSkipped(f"the {'data' if rows is None else 'model'} cannot be read")
    config, notes = target.config, list[str]()
    found = prepared(config, model_dir, *rows, notes.append)
    tokenizer = load_tokenizer(found.model_dir, config.model.trust_remote_code)
    text = tokenizer.decode(found.prompts[0].token_ids)
    dots = "..." if len(text) > _SHOWN else ""
    if (pools := config.data.pools) is not None:
        sizes = pool_sizes(found.prompts, pools.by)
        notes.append("pools: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
    lines = [
        f"{len(found.prompts)} prompts, {sum(len(s.prompts) for s in found.eval_sets)} held out",
        *notes,
        f"the end of the first prompt ({len(found.prompts[0].token_ids)} tokens), whose answer is "
        f"{found.prompts[0].answer!r}:",
        *(f"  | {line}" for line in (dots + text[-_SHOWN:]).splitlines()),
    ]
    return ReadInput("\n    ".join(lines), found)
