"""A training session: from the configuration to the exported, evaluated model."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING

from grpo_dist import driver
from grpo_dist.config import BatchConfig, Config
from grpo_dist.config.files import dump_config
from grpo_dist.config.presets import described
from grpo_dist.data.columns import uids_of
from grpo_dist.data.order import step_prompts
from grpo_dist.data.stream import PromptStream
from grpo_dist.errors import RERUN, RunEnded, UserError, as_user_errors
from grpo_dist.evaluation.sampling import evaluate
from grpo_dist.loop import ledger, supervised
from grpo_dist.loop.chores import evaluates_export
from grpo_dist.loop.ledger import DROPPED
from grpo_dist.observe.console import print_before_after
from grpo_dist.observe.tracker import LEDGER, Tracker
from grpo_dist.observe.trackers import check_trackers
from grpo_dist.policy.full_weights import add_file, why_no_export
from grpo_dist.policy.text_model import usable_model
from grpo_dist.runs.checkpoint import (
    CHECKPOINTS,
    REFERENCE,
    Checkpoints,
    ResumePoint,
    changes_since,
    check_models,
    find_resume_state,
    list_checkpoints,
    load_resume_point,
    load_state,
    newest_whole,
    order_state,
    other_code,
    other_layout,
    recorded_changes,
    remove_partial,
)
from grpo_dist.runs.identity import digest_run_code
from grpo_dist.runs.model_card import CARD, model_card
from grpo_dist.runs.preemption import Interruption, ended_by_sigterm
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.recovery import Recovery
from grpo_dist.runs.run_directory import (
    MODEL,
    add_resume_settings,
    check_writable,
    choose_run_dir,
    exclusive_directory,
    explain_resume,
    mark_finished,
    read_template_date,
    set_template_date,
    write_environment,
)
from grpo_dist.runs.run_weights import restore_begun
from grpo_dist.runs.start import SupervisedInputs, load_inputs, load_supervised_inputs, resolve_steps
from grpo_dist.runtime.concurrency import deadline, run_in_thread
from grpo_dist.runtime.files import check_room, keep_backup, write_text
from grpo_dist.runtime.hardware import DeviceType
from grpo_dist.runtime.stage_log import log_ready, print_line, stage
from grpo_dist.workers import PolicyHandle, Workers

if TYPE_CHECKING:  # Ray takes seconds to import
    from actors.cluster import Cluster


@dataclass(frozen=True)
class Run:
    """The objects of a training session."""

    config: Config
    identity: Config  # see `checkpoint.load_state`
    inputs: RunInputs
    directory: Path
    tracker: Tracker
    checkpoints: Checkpoints

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """Hold an error of the block until a checkpoint being written is done: see `settle`."""
        try:
            yield
        except Exception:
            await self.settle()
            raise

    async def settle(self) -> None:
        """Wait for the checkpoint being written. If it fails, drop it with a warning: the checkpoint before
        stays the newest.
        """
        try:
            await self.checkpoints.settle()
        except Exception as error:
            self.tracker.warn(f"the checkpoint that was being written failed and is dropped ({error})")

    async def newest(self) -> ResumePoint:
        """Find the point to go back to. A thread reads the files, while the loop supervises the actors.

        Raises RunEnded if no checkpoint can be used, or that takes longer than writing all checkpoints may
        take: new workers would not read them faster.
        """
        await self.settle()
        damaged: list[str] = []
        count = max(1, len(list_checkpoints(self.directory / CHECKPOINTS)))

        def find() -> ResumePoint:
            checkpoint = newest_whole(self.directory / CHECKPOINTS, damaged.append)
            state = load_state(checkpoint, self.identity) if checkpoint else None
            return load_resume_point(checkpoint, state, self.inputs.trained, self.inputs.origin)

        limit_s = self.config.cluster.timeouts.save_s * count
        try:
            async with deadline(limit_s, "recovery: find the newest undamaged checkpoint"):
                return await run_in_thread(find)
        except TimeoutError as error:
            raise RunEnded(f"{error}; when it can be read, {RERUN}") from error
        except ValueError as error:
            raise RunEnded(f"recovery: {error}") from error
        finally:
            for warning in damaged:
                self.tracker.warn(warning)


def audit(run: Run) -> str:
    """Return the ledger's totals of a finished run. Raises RunEnded if the run was not trained on the right
    prompts, or the ledger records them wrongly.
    """
    run.tracker.flush()
    totals = ledger.summary(run.directory / LEDGER, dropped=len(run.inputs.dropped))
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
    """Describe what is wrong with the ledger. Raises ValueError if the checkpoint to compare is missing."""
    config, count = run.config, run.config.batch.prompts_per_step
    expected_uids: Callable[[int], set[str]] | None = None
    expected_counts = None
    drops = config.data.drop_solved is not None
    drawn_singly = config.dynamic_sampling.enabled or config.batch.order.name == "completion"
    is_stream = drawn_singly or config.data.weights or drops
    if config.data.order.name == "length" or (config.data.order.name == "epochs" and is_stream):
        expected_counts = _expected_counts(run)
    elif config.data.order.name == "epochs":
        expected_uids = partial(_expected_uids, uids_of(run.inputs.prompts), config.batch, config.seed)
    return ledger.audit(
        run.directory / LEDGER,
        steps=config.steps,
        prompts_per_step=count,
        expected_per_step=expected_uids,
        expected_counts=expected_counts,
    )


def _expected_counts(run: Run) -> Counter[str]:
    """Return how often each prompt should have been sampled, by the last checkpoint. Raises ValueError."""
    config, checkpoints = run.config, list_checkpoints(run.directory / CHECKPOINTS)
    state = load_state(checkpoints[-1], run.identity) if checkpoints else None
    if state is None or state.step != config.steps:
        raise ValueError(f"{run.directory / CHECKPOINTS}: no checkpoint of step {config.steps}")
    per_batch = config.batch.prompts_per_step
    prompts, order = run.inputs.prompts, order_state(state)
    stream = PromptStream(prompts, per_batch, seed=config.seed, state=order, weights=config.data.weights)
    # Some are still in flight if `steps` was larger when they were launched.
    return stream.sampled(index for indices in state.taken.values() for index in indices)


def _expected_uids(uids: list[str], batch: BatchConfig, seed: int, step: int) -> set[str]:
    """Return the uids of ``step``, counted from 1."""
    return {uids[i] for i in step_prompts(len(uids), batch.prompts_per_step, seed, step - 1)}


def train(config: Config, *, identity: Config | None = None) -> Path:
    """Run ``config`` to its end and return the run directory. ``identity``: see `checkpoint.load_state`. The
    caller uses `ended_by_sigterm`.

    Raises UserError for input that cannot be used, and RunEnded if the run ends before its last step.
    """
    with as_user_errors():
        check_trackers(config.tracking)
        run_dir = choose_run_dir(config.checkpoint, config.name, config.output_dir)
        existing = check_writable(run_dir)
        config = restore_begun(resolve_steps(config, print_line), run_dir, print_line)
        identity = identity or config
        config = set_template_date(config, read_template_date(run_dir))
    # `ended_by_sigterm` again: its Preempted passes `explain_resume`.
    with (
        explain_resume(config.checkpoint, run_dir),
        ended_by_sigterm(),
        exclusive_directory(run_dir, existing),
    ):
        inputs, point = _load_inputs(run_dir, config, identity)
        with _open_tracker(run_dir, config, inputs, point) as tracker:
            for warning in inputs.warnings:
                tracker.note(warning)
            checkpoints = Checkpoints(
                run_dir / CHECKPOINTS,
                config,
                inputs.trained,
                identity=identity,
                wandb_id=tracker.wandb_id,
                origin=inputs.origin,
                models={**inputs.model_digests, **point.models},
            )
            run = Run(config, identity, inputs, run_dir, tracker, checkpoints)
            run, final = asyncio.run(_session(run, point))
            # Before the run is marked finished: nothing may build on a wrong ledger.
            with stage("ledger", quiet=True):
                totals = None if config.is_supervised else audit(run)
            tracker.flush()
            if config.checkpoint.export and (run_dir / MODEL).is_dir():
                add_file(run_dir / MODEL, CARD, model_card(config, run_dir, run.config.steps))
        mark_finished(run_dir, run.config.steps)
        _print_result(run_dir, final)
        if totals:
            print_line(totals)
        for line in next_commands(run_dir):
            print_line(line)
        return run_dir


def _load_inputs(run_dir: Path, config: Config, identity: Config) -> tuple[RunInputs, ResumePoint]:
    """Check all input, and find where the run resumes. Raises UserError for unusable input."""
    with stage("actors", "their code is loaded"):
        import actors.cluster  # noqa: F401 (Ray takes seconds to import)
        from actors.connection import address_of, fit

    with as_user_errors():
        with stage("checks", f"checkpoints in {run_dir}, placement"):
            newest, state = find_resume_state(config, identity, run_dir, print_line)
            has = fit(config)
        device: DeviceType = "cuda" if has.gpus else "cpu"
        if address_of(config.cluster) == "local":
            # torch's part for kernels imports setuptools.
            from grpo_dist.policy.extensions import begin_kernels

            begin_kernels(config.policy, device)  # a cold start computes in one thread
        load = load_supervised_inputs if config.is_supervised else load_inputs
        inputs = load(config, print_line, device=device)
        with stage("resume point", quiet=True):
            point = load_resume_point(newest, state, inputs.trained, inputs.origin)
            if newest and state:
                for warning in check_models(newest, state, inputs.model_digests, config):
                    print_line(warning)
                    inputs.warnings.append(warning)
    return inputs, point


def _open_tracker(run_dir: Path, config: Config, inputs: RunInputs, point: ResumePoint) -> Tracker:
    """Write the files that describe the run, and open its tracker. Raises DiskFull or UserError if the
    directory cannot be written.
    """
    remove_partial(run_dir / CHECKPOINTS)  # these may fill the disk
    try:
        write_text(run_dir / "config.yaml", dump_config(config))
        write_environment(run_dir)
        write_text(run_dir / DROPPED, "".join(json.dumps(asdict(row)) + "\n" for row in inputs.dropped))
        tracker = Tracker(config, run_dir, start=point.step, wandb_id=point.wandb_id)
    except OSError as error:
        check_room(run_dir, error)
        raise UserError(
            f"{error.filename or run_dir}: {error.strerror or error}; expected a file of the run, or none: "
            "move it away, or choose another `name`"
        ) from error
    if not config.is_supervised:
        print_line(described(config))
    return tracker


async def _session(run: Run, first: ResumePoint) -> tuple[Run, dict[str, float]]:
    """Train to the end. Returns the run, with its final number of steps, and the evaluation of the exported
    model, {} if there is none.
    """
    from actors.cluster import (
        Cluster,  # imports Ray
        SupervisedCluster,
    )

    config, inputs = run.config, run.inputs
    interruption = Interruption(grace_s=config.checkpoint.grace_s, say=print_line)
    actors = (SupervisedCluster if config.is_supervised else Cluster)(config, inputs.teacher_dirs)
    async with interruption, actors as cluster, run.settled():
        interruption.listen()  # Ray has installed another handler
        recovery = Recovery(
            config.cluster,
            cluster,
            run.tracker,
            run.newest,
            inputs.model_dir,
            first=first,
            start=partial(_start, run, cluster, first),
            remedy=add_resume_settings(RERUN, config.checkpoint, run.directory),
        )
        async for attempt in recovery.attempts():
            async with attempt as (point, workers):
                await _check_shared(run.directory, workers.policy)
                await _restore(run, point, workers)
                loop, stop_requested = _loop(run, workers), interruption.stop_requested
                with interruption.finishing():
                    steps = await loop(
                        run.tracker, run.checkpoints, point.progress, stop_requested=stop_requested
                    )
                run = replace(run, config=config.model_copy(update={"steps": steps}))
                await _finish(run, workers)
        if not (evaluates_export(config.evaluation, config.checkpoint) and inputs.eval_sets):
            return run, {}
        await cluster.stop_workers()
        return run, await _evaluate_export(run, cluster)


async def _start(run: Run, cluster: Cluster, first: ResumePoint) -> Workers:
    """Start the workers of the first attempt."""
    config, explain = run.config, cluster.where_stuck
    async with deadline(config.cluster.timeouts.up_s, "start: actors up and models loaded", explain=explain):
        workers = await cluster.start_training(run.inputs.model_dir)
    if first.checkpoint is not None:
        since = changes_since(first.checkpoint, config)
        print_line(f"resuming from {first}{other_layout(since)}")
        for change in recorded_changes(since, first.step):
            print_line(change)
            run.tracker.note(change)
        hashes = digest_run_code(config)
        if changed := other_code(first.checkpoint, hashes):
            run.tracker.warn(changed)
    return workers


def _loop(run: Run, workers: Workers) -> Callable[..., Awaitable[int]]:
    """Return the loop of the run on ``workers``: the driver's, or supervised training."""
    config, inputs = run.config, run.inputs
    if isinstance(inputs, SupervisedInputs):
        return partial(supervised.run, config, workers, inputs.prompts, inputs.held_out)
    return partial(
        driver.run, config, workers, inputs.prompts, inputs.eval_sets, demonstrations=inputs.demonstrations
    )


async def _finish(run: Run, workers: Workers) -> None:
    """Write the trained model, if configured. Keep files that a user has put there during the run."""
    if run.config.checkpoint.export:
        directory = run.directory / MODEL
        if reason := why_no_export(directory):
            backup = keep_backup(directory)
            run.tracker.warn(f"{directory} was no earlier export of the run ({reason}); it is now {backup}")
        with stage("export", f"the trained model is written to {directory}"):
            await workers.policy.export(directory, tokenizer_dir=run.inputs.model_dir)


async def _restore(run: Run, point: ResumePoint, workers: Workers) -> None:
    """Load weights, optimiser and reference of ``point``, send the weights to the engines, and show the
    workers' usage.
    """
    config = run.config
    if point.checkpoint is not None:
        with as_user_errors(), stage("checkpoint", "policy ranks load weights and optimiser"):
            await workers.policy.load(point.checkpoint / "policy")
        if workers.reference is not None and config.reference.refresh_every:
            limit_s, what = config.cluster.timeouts.save_s, f"reference: restore from {point}"
            with stage("reference", "its refreshed weights are loaded"):
                async with deadline(limit_s, what, explain=workers.where_stuck):
                    await workers.reference.load(point.checkpoint / REFERENCE)
    if not config.is_supervised:
        with stage("weight sync", "engines get the policy's weights"):
            await workers.sync.push(version=point.step)
    if workers.usage is not None:
        run.tracker.follow(workers.usage)
    log_ready()


async def _check_shared(run_dir: Path, policy: PolicyHandle) -> None:
    """Raise UserError if the node of a policy rank does not see what the driver writes into ``run_dir``."""
    descriptor, name = mkstemp(prefix=".shared_", dir=run_dir)  # no node has an old file of this name
    os.close(descriptor)
    try:
        with as_user_errors():
            await policy.check_sees(Path(name))
    finally:
        os.unlink(name)


async def _evaluate_export(run: Run, cluster: Cluster) -> dict[str, float]:
    """Evaluate the exported files on a new engine: the reported number is of the model that a user gets."""
    config, stuck, directory = run.config, cluster.where_stuck, run.directory / MODEL
    limit_s, trusted = config.cluster.timeouts.up_s, config.model.trust_remote_code
    model_dir = usable_model(directory, f"the export {directory}", print_line, trust_remote_code=trusted)
    async with deadline(limit_s, "start: engine on the exported model", explain=stuck):
        samplers = await cluster.start_evaluation(model_dir)
    with stage("final evaluation", "of the exported model"):
        final = await evaluate(
            config, samplers, run.inputs.eval_sets, run.tracker, step=config.steps, explain=stuck
        )
    run.tracker.log(config.steps, final)
    return final


def next_commands(run_dir: Path) -> list[str]:
    """Return lines with the model of the finished run in ``run_dir`` and the next commands."""
    lines = [f"next: grpo-dist report {run_dir}"]
    if (model := run_dir / MODEL).is_dir():
        lines = [f"model: {model}", *lines, f"      grpo-dist eval {run_dir} [DATA]"]
    if list_checkpoints(run_dir / CHECKPOINTS):
        lines.append(f"      grpo-dist export {run_dir}[@STEP] [--push USER/REPO]")
    return lines


def _print_result(run_dir: Path, final: dict[str, float]) -> None:
    """Print a table of the evaluations before training and of the exported model, if there are any."""
    if final:
        first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
        print_before_after(first if first["step"] == 0 else {}, final, str(run_dir))
    else:
        print_line(f"run directory: {run_dir}")
