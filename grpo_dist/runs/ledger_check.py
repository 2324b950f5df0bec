"""The audit of the ledger before a run is marked done, so that nothing builds on a wrong one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from grpo_dist.config import BatchConfig
from grpo_dist.data.order import step_prompts
from grpo_dist.data.stream import PromptStream
from grpo_dist.errors import RunEnded
from grpo_dist.loop import ledger
from grpo_dist.observe import LEDGER
from grpo_dist.runs.checkpoint import CHECKPOINTS, list_checkpoints
from grpo_dist.runs.resume import load_state, order_state
from grpo_dist.runs.run import Run


def audit(run: Run) -> str:
    """Return the ledger's totals of a finished run. Raises RunEnded where the run was not trained on the
    prompts it was to be trained on, or the ledger records them wrongly.
    """
    run.tracker.flush()
    totals = ledger.summary(run.directory / LEDGER, dropped=len(run.prepared.dropped))
    try:
        wrong = _find_error(run)
    except ValueError as error:
        run.tracker.warn(f"the ledger cannot be checked: {error}")
        return totals
    if wrong:
        raise RunEnded(
            f"{totals}\n{run.directory}: all steps are done, but the ledger does not balance: {wrong}. Some "
            "prompts were trained on the wrong number of times or recorded wrongly. Please report this and "
            "attach the ledger"
        )
    return totals


def _find_error(run: Run) -> str | None:
    """Describe what is wrong with the ledger. Raises ValueError where the checkpoint to compare with is
    missing.
    """
    config, count = run.config, run.config.batch.prompts_per_step
    expected_uids: Callable[[int], set[str]] | None = None
    expected_counts = None
    drops = config.data.drop_solved is not None
    drawn_singly = config.dynamic_sampling.enabled or config.batch.order == "completion"
    of_a_stream = drawn_singly or config.data.weights or drops
    if config.data.order == "length" or (config.data.order == "epochs" and of_a_stream):
        expected_counts = _expected_counts(run)
    elif config.data.order == "epochs":
        expected_uids = partial(
            _expected_uids, [prompt.uid for prompt in run.prepared.prompts], config.batch, config.seed
        )
    return ledger.audit(
        run.directory / LEDGER,
        steps=config.steps,
        prompts_per_step=count,
        expected_per_step=expected_uids,
        expected_counts=expected_counts,
    )


def _expected_counts(run: Run) -> Counter[str]:
    """Return how often each prompt should have been sampled, by the last checkpoint. Raises ValueError."""
    config, found = run.config, list_checkpoints(run.directory / CHECKPOINTS)
    state = load_state(found[-1], run.identity) if found else None
    if state is None or state.step != config.steps:
        raise ValueError(f"{run.directory / CHECKPOINTS}: no checkpoint of step {config.steps}")
    per_batch = config.batch.prompts_per_step
    prompts, order = run.prepared.prompts, order_state(state)
    stream = PromptStream(prompts, per_batch, seed=config.seed, state=order, weights=config.data.weights)
    # Some are still in flight where the run was to have more steps when they were launched.
    return stream.sampled(index for indices in state.taken.values() for index in indices)


def _expected_uids(uids: list[str], batch: BatchConfig, seed: int, step: int) -> set[str]:
    """Return the uids whose turn ``step`` is, counted from 1."""
    return {uids[i] for i in step_prompts(len(uids), batch.prompts_per_step, seed, step - 1)}
