"""A training session: from the configuration to the exported, evaluated model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist import driver
from grpo_dist.config import Config
from grpo_dist.config.files import dump_config
from grpo_dist.config.presets import described
from grpo_dist.errors import Rollback, StateLost, UserError, refusals
from grpo_dist.evaluation.sampling import evaluate
from grpo_dist.loop import supervised
from grpo_dist.loop.ledger import DROPPED
from grpo_dist.observe import Tracker
from grpo_dist.observe.console import print_before_after
from grpo_dist.observe.settings import check_trackers
from grpo_dist.runs.checkpoint import CHECKPOINTS, REFERENCE, Checkpoints, newest_whole, remove_partial
from grpo_dist.runs.environment import write_environment
from grpo_dist.runs.ledger_check import audit
from grpo_dist.runs.preemption import Interruption, ended_by_sigterm
from grpo_dist.runs.prepare import Prepared, check_writable, choose_run_dir, prepare
from grpo_dist.runs.prepare_supervised import PreparedDemonstrations, prepare_supervised
from grpo_dist.runs.recovery import Recovery
from grpo_dist.runs.resume import ResumePoint, load_resume_point, load_state, other_layout
from grpo_dist.runs.run import Run, check_unfinished, exclusive_directory, mark_finished
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.files import check_room, write_text
from grpo_dist.runtime.stage_log import stage, stages_logged
from grpo_dist.workers import Workers

if TYPE_CHECKING:  # Ray takes seconds to import
    from actors.cluster import Cluster


def train(config: Config, *, identity: Config | None = None) -> Path:
    """Run ``config`` to its end and return the run directory. ``identity``: see `resume.load_state`.

    Raises UserError for input that cannot be used, and RunEnded where the run ends before its last step.
    """
    identity = identity or config
    with ended_by_sigterm(), stages_logged(enabled=config.tracking.console):
        with refusals():
            check_trackers(config.tracking)
            run_dir = choose_run_dir(config)
            existing = check_writable(run_dir)
        with exclusive_directory(run_dir, existing):
            prepared, point = _prepare(run_dir, config, identity)
            with _open_tracker(run_dir, config, prepared, point) as tracker:
                for warning in prepared.warnings:
                    tracker.note(warning)
                checkpoints = Checkpoints(
                    run_dir / CHECKPOINTS,
                    config,
                    prepared.prompts,
                    identity=identity,
                    wandb_id=tracker.wandb_id,
                )
                run = Run(config, identity, prepared, run_dir, tracker, checkpoints)
                final = asyncio.run(_session(run, point))
                # Before the run is marked done: nothing may build on a wrong ledger.
                totals = None if config.is_supervised else audit(run)
            mark_finished(run)
            _print_result(run_dir, final)
            if totals:
                _say(totals)
            return run_dir


def _prepare(run_dir: Path, config: Config, identity: Config) -> tuple[Prepared, ResumePoint]:
    """Check all input, and find where the run resumes. Raises UserError for what cannot be used."""
    with stage("actors", "their code is loaded"):
        from actors.cluster import fit  # Ray takes seconds to import

    with refusals():
        with stage("checks", f"checkpoints in {run_dir}, placement"):
            newest = newest_whole(run_dir / CHECKPOINTS, _say) if config.checkpoint.resume == "auto" else None
            state = load_state(newest, identity) if newest else None
            has = fit(config)
        load = prepare_supervised if config.is_supervised else prepare
        prepared = load(config, _say, device="cuda" if has.gpus else "cpu")
        point = load_resume_point(newest, state, prepared.prompts)
    check_unfinished(config, run_dir, point.step)
    return prepared, point


def _open_tracker(run_dir: Path, config: Config, prepared: Prepared, point: ResumePoint) -> Tracker:
    """Write the files that describe the run, and open its tracker. Raises DiskFull or UserError where the
    directory takes no files.
    """
    remove_partial(run_dir / CHECKPOINTS)  # which may be what fills the disk
    try:
        write_text(run_dir / "config.yaml", dump_config(config))
        write_environment(run_dir)
        write_text(run_dir / DROPPED, "".join(json.dumps(asdict(row)) + "\n" for row in prepared.dropped))
        tracker = Tracker(config, run_dir, start=point.step, wandb_id=point.wandb_id)
    except OSError as error:
        check_room(run_dir, error)
        raise UserError(
            f"{error.filename or run_dir}: {error.strerror or error}; expected a file of the run, or none: "
            "move it away, or choose another `name`"
        ) from error
    if not config.is_supervised:
        _say(described(config))
    return tracker


async def _session(run: Run, first: ResumePoint) -> dict[str, float]:
    """Train to the end. Returns the evaluation of the exported model, {} where there is none."""
    from actors.cluster import Cluster
    from actors.supervised import SupervisedCluster

    config, model_dir = run.config, run.prepared.model_dir
    interruption = Interruption(grace_s=config.checkpoint.grace_s, say=_say)
    actors = (SupervisedCluster if config.is_supervised else Cluster)(config)
    async with interruption, actors as cluster:
        interruption.listen()  # Ray has installed a handler of its own

        async def start() -> Workers:
            limit_s, stage = config.cluster.timeouts.up_s, "start: actors up and models loaded"
            async with deadline(limit_s, stage, explain=cluster.where_stuck):
                workers = await cluster.start_training(model_dir)
            if first.checkpoint is not None:
                _say(f"resuming from {first}{other_layout(first.checkpoint, config)}")
            return workers

        recovery = Recovery(
            config.cluster, cluster, run.tracker, run.newest, model_dir, first=first, start=start
        )
        try:
            while True:
                try:
                    async with recovery.attempt() as (point, workers):
                        await _resume(run, interruption, point, workers)
                    break
                except (StateLost, Rollback) as error:
                    await recovery.consume_restart(error)
        except Exception:
            await run.settle()
            raise
        if not (config.checkpoint.export and config.evaluation.after and run.prepared.eval_sets):
            return {}
        await cluster.stop_workers()
        return await _evaluate_export(run, cluster)


async def _resume(run: Run, interruption: Interruption, point: ResumePoint, workers: Workers) -> None:
    """Train from ``point`` and export the model. Raises what the driver does."""
    config, prepared = run.config, run.prepared
    await _restore(config, point, workers)
    if workers.usage is not None:
        run.tracker.follow(workers.usage)
    if isinstance(prepared, PreparedDemonstrations):
        loop = partial(supervised.run, config, workers, prepared.demonstrations, prepared.held_out)
    else:
        loop = partial(driver.run, config, workers, prepared.prompts, prepared.eval_sets)
    with interruption.finishing():
        await loop(
            run.tracker,
            run.checkpoints,
            start=point.step,
            progress=point.progress,
            stop_requested=interruption.stop_requested,
        )
    run.tracker.loop_ended()
    if config.checkpoint.export:
        directory = run.directory / "model"
        with stage("export", f"the trained model is written to {directory}"):
            await workers.policy.export(directory, tokenizer_dir=prepared.model_dir)


async def _restore(config: Config, point: ResumePoint, workers: Workers) -> None:
    """Load weights, optimiser and reference of ``point``, and send the weights to the engines."""
    if point.checkpoint is not None:
        with refusals(), stage("checkpoint", "policy ranks load weights and optimiser"):
            await workers.policy.load(point.checkpoint / "policy")
        if workers.reference is not None and config.reference.refresh_every:
            async with deadline(
                config.cluster.timeouts.save_s,
                f"reference: restore from {point}",
                explain=workers.where_stuck,
            ):
                await workers.reference.load(point.checkpoint / REFERENCE)
    if config.is_supervised:
        return
    with stage("weight sync", "engines get the policy's weights"):
        await workers.sync.push(version=point.step)


async def _evaluate_export(run: Run, cluster: Cluster) -> dict[str, float]:
    """Evaluate the exported files on a new engine: the reported number is that of the model a user gets."""
    config, stuck = run.config, cluster.where_stuck
    limit_s = config.cluster.timeouts.up_s
    async with deadline(limit_s, "start: engine on the exported model", explain=stuck):
        samplers = await cluster.start_evaluation(run.directory / "model")
    with stage("final evaluation", "of the exported model"):
        final = await evaluate(
            config, samplers, run.prepared.eval_sets, run.tracker, step=config.steps, explain=stuck
        )
    run.tracker.log(config.steps, final)
    return final


def _print_result(run_dir: Path, final: dict[str, float]) -> None:
    """Print a table of the evaluations before training and of the exported model, where they were made."""
    if final:
        first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
        print_before_after(first if first["step"] == 0 else {}, final, str(run_dir))
    else:
        _say(f"run directory: {run_dir}")


def _say(message: str) -> None:
    print(message, flush=True)
