"""A training session from the configuration to the exported, evaluated model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from grpo_dist import driver
from grpo_dist.config import Config
from grpo_dist.config.files import dump_config
from grpo_dist.config.presets import described
from grpo_dist.data.order import step_prompts
from grpo_dist.data.stream import PromptStream
from grpo_dist.errors import RunEnded, UserError, refusals
from grpo_dist.evaluation.sampling import evaluate
from grpo_dist.loop.ledger import DROPPED, imbalance, summary
from grpo_dist.observe import LEDGER, Tracker
from grpo_dist.observe.console import print_before_after
from grpo_dist.observe.settings import check_trackers
from grpo_dist.runs.checkpoint import (
    CHECKPOINTS,
    REFERENCE,
    Checkpoints,
    Place,
    list_checkpoints,
    load_place,
    load_state,
    newest_whole,
    order_state,
    other_layout,
    remove_partial,
)
from grpo_dist.runs.environment import write_environment
from grpo_dist.runs.preemption import Interruption, ended_by_sigterm
from grpo_dist.runs.prepare import (
    Prepared,
    check_writable,
    choose_run_dir,
    prepare,
)
from grpo_dist.runs.recovery import Recovery
from grpo_dist.runtime.concurrency import deadline, in_thread
from grpo_dist.runtime.files import LOCK, alone, check_room, write_text
from grpo_dist.runtime.stage_log import stage, stages_logged
from grpo_dist.workers import Workers

_PATIENCE_S = 10.0
_DONE = "DONE"  # in a run directory once everything of the run is done; holds the number of steps


def train(config: Config, *, identity: Config | None = None) -> Path:
    """Run ``config`` to its end and return the run directory. ``identity``: see `checkpoint.load_state`.

    Raises UserError for input that cannot be used.
    """
    with ended_by_sigterm(), _stages(config):
        return _train_to_the_end(config, identity or config)


def _stages(config: Config) -> AbstractContextManager[None]:
    return stages_logged() if config.tracking.console else nullcontext()


def _train_to_the_end(config: Config, identity: Config) -> Path:
    with refusals():
        check_trackers(config.tracking)
        run_dir = choose_run_dir(config)
        there = check_writable(run_dir)
    with _alone_in(run_dir, there):
        return _train_in(run_dir, config, identity)


def _train_in(run_dir: Path, config: Config, identity: Config) -> Path:
    with stage("actors", "their code is loaded"):
        from actors.cluster import fit

    with refusals():
        with stage("checks", f"checkpoints in {run_dir}, placement"):
            newest = _resumable(config, run_dir)
            state = load_state(newest, identity) if newest else None
            has = fit(config)
        prepared = prepare(config, _say, device="cuda" if has.gpus else "cpu")
        place = load_place(newest, state, prepared.prompts)
    check_unfinished(config, run_dir, place.step)
    remove_partial(run_dir / CHECKPOINTS)  # which may be what fills the disk
    try:
        write_text(run_dir / "config.yaml", dump_config(config))
        write_environment(run_dir)
        write_text(run_dir / DROPPED, "".join(json.dumps(asdict(row)) + "\n" for row in prepared.dropped))
        tracker = Tracker(config, run_dir, start=place.step, wandb_id=place.wandb_id)
    except OSError as error:
        check_room(run_dir, error)
        raise UserError(
            f"{error.filename or run_dir}: {error.strerror or error}; expected a file of the run, or none: "
            "move it away, or choose another `name`"
        ) from error
    _say(described(config))
    with tracker:
        for warning in prepared.warnings:
            tracker.note(warning)
        checkpoints = Checkpoints(
            run_dir / CHECKPOINTS, config, prepared.prompts, identity=identity, wandb_id=tracker.wandb_id
        )
        run = Run(config, identity, prepared, run_dir, tracker, checkpoints)
        final = asyncio.run(_train(run, place))
        books = _checked_books(run)  # before it is called done: nothing goes on from wrong ones
    write_text(run_dir / _DONE, f"{config.steps}\n")
    _print_result(run_dir, final)
    _say(books)
    return run_dir


@dataclass(frozen=True)
class Run:
    """What a training session works with from its start to its end."""

    config: Config
    identity: Config
    prepared: Prepared
    directory: Path
    tracker: Tracker
    checkpoints: Checkpoints

    async def settle(self) -> None:
        """The checkpoint that is being written is finished, or given up: the one before it stands."""
        try:
            await self.checkpoints.settle()
        except Exception as error:
            self.tracker.warn(f"the checkpoint that was being written is given up ({error})")

    async def newest(self) -> Place:
        """Where it can go on from when it has to go back. Files are read beside the loop, which watches over
        actors meanwhile. Raises RunEnded where that takes longer than all of them took to be written: to read
        them again, with new workers, would take no less.
        """
        await self.settle()
        damaged: list[str] = []
        written = max(1, len(list_checkpoints(self.directory / CHECKPOINTS)))

        def find() -> Place:
            checkpoint = newest_whole(self.directory / CHECKPOINTS, damaged.append)
            state = load_state(checkpoint, self.identity) if checkpoint else None
            return load_place(checkpoint, state, self.prepared.prompts)

        limit_s = self.config.cluster.timeouts.save_s * written
        try:
            async with deadline(limit_s, "recovery: the newest whole checkpoint is found"):
                return await in_thread(find)
        except TimeoutError as error:
            raise RunEnded(f"{error}. The same command goes on from it, when it can be read") from error
        finally:
            for warning in damaged:
                self.tracker.warn(warning)


def _checked_books(run: Run) -> str:
    """The totals of a finished run. Raises RunEnded where it has not trained on what it was to."""
    run.tracker.flush()
    totals = summary(run.directory / LEDGER, dropped=len(run.prepared.dropped))
    try:
        wrong = _imbalance(run)
    except ValueError as error:
        run.tracker.warn(f"the ledger cannot be checked: {error}")
        return totals
    if wrong:
        raise RunEnded(
            f"{totals}\n{run.directory}: all steps are done, but the ledger does not balance: {wrong}. Some "
            "prompts were trained on more often than others, or are told of wrongly; please report it, with "
            "the ledger"
        )
    return totals


def _imbalance(run: Run) -> str | None:
    """What is wrong with the books. Raises ValueError where what they are held against is not there."""
    config, count = run.config, run.config.batch.prompts_per_step
    turns: Callable[[int], set[str]] | None = None
    often = None
    if config.data.order == "epochs" and config.dynamic_sampling.enabled:
        often = _sampled(run)
    elif config.data.order == "epochs":
        turns = partial(_turns, [prompt.uid for prompt in run.prepared.prompts], config)
    return imbalance(
        run.directory / LEDGER, steps=config.steps, prompts_per_step=count, turns=turns, often=often
    )


def _sampled(run: Run) -> Counter[str]:
    """How often each prompt was to be sampled in all steps, by the last checkpoint. Raises ValueError."""
    config, found = run.config, list_checkpoints(run.directory / CHECKPOINTS)
    state = load_state(found[-1], run.identity) if found else None
    if state is None or state.step != config.steps:
        raise ValueError(f"{run.directory / CHECKPOINTS}: no checkpoint of step {config.steps}")
    per_batch = config.batch.prompts_per_step
    stream = PromptStream(run.prepared.prompts, per_batch, seed=config.seed, state=order_state(state))
    # Some are on their way where the run was to have more steps when they were launched.
    return stream.sampled(place for places in state.taken.values() for place in places)


def _turns(uids: list[str], config: Config, step: int) -> set[str]:
    """Whose turn a step (from 1) is."""
    return {uids[i] for i in step_prompts(len(uids), config.batch.prompts_per_step, config.seed, step - 1)}


@contextmanager
def _alone_in(run_dir: Path, there: Path) -> Iterator[None]:
    """It is made below ``there``, and goes again where the run is refused before anything is in it. A process
    that was asked to end is waited for a moment.
    """
    what = "training this run; wait for it, or choose another `name`"
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(run_dir, what, patience_s=_PATIENCE_S))
        except OSError as error:
            check_room(there, error)
            raise
        try:
            yield
        except UserError:
            # Only with the lock: where another process has it, the directory is that one's.
            if run_dir != there and [path.name for path in run_dir.iterdir()] == [LOCK]:
                shutil.rmtree(run_dir)
                for parent in takewhile(lambda path: path != there.absolute(), run_dir.absolute().parents):
                    with suppress(OSError):  # somebody else has something in it by now
                        parent.rmdir()
            raise


async def _train(run: Run, place: Place) -> dict[str, float]:
    """The whole session; the evaluation of the exported model, {} where there is none."""
    from actors.cluster import Cluster

    config, model_dir = run.config, run.prepared.model_dir
    interruption = Interruption(grace_s=config.checkpoint.grace_s, say=_say)
    async with interruption, Cluster(config) as cluster:
        interruption.listen()  # Ray has put a handler of its own in place

        async def start() -> Workers:
            limit_s, stage = config.cluster.timeouts.up_s, "start: actors up and models loaded"
            async with deadline(limit_s, stage, explain=cluster.where_stuck):
                workers = await cluster.start_training(model_dir)
            if place.checkpoint is not None:
                _say(f"resuming from {place}{other_layout(place.checkpoint, config)}")
            return workers

        recovery = Recovery(config, cluster, run.tracker, run.newest, model_dir)
        try:
            await recovery.carry_through(partial(_go_on, run, interruption), place, start)
        except Exception:
            await run.settle()
            raise
        if not (config.checkpoint.export and config.evaluation.after and run.prepared.eval_sets):
            return {}
        await cluster.stop_workers()
        # A fresh engine on the exported files: the reported number is that of the model a user gets.
        async with deadline(
            config.cluster.timeouts.up_s,
            "start: engine on the exported model",
            explain=cluster.where_stuck,
        ):
            samplers = await cluster.start_evaluation(run.directory / "model")
        with stage("final evaluation", "of the exported model"):
            final = await evaluate(
                config,
                samplers,
                run.prepared.eval_sets,
                run.tracker,
                step=config.steps,
                explain=cluster.where_stuck,
            )
        run.tracker.log(config.steps, final)
        return final


async def _go_on(run: Run, interruption: Interruption, place: Place, workers: Workers) -> None:
    """From ``place`` to the exported model. Raises what the driver does."""
    config, prepared = run.config, run.prepared
    await _restore(config, place, workers)
    if workers.usage is not None:
        run.tracker.follow(workers.usage)
    with interruption.finishing():
        await driver.run(
            config,
            workers,
            prepared.prompts,
            prepared.eval_sets,
            run.tracker,
            run.checkpoints,
            start=place.step,
            progress=place.progress,
            asked_to_end=interruption.asked,
        )
    run.tracker.loop_ended()
    if config.checkpoint.export:
        directory = run.directory / "model"
        with stage("export", f"the trained model is written to {directory}"):
            await workers.policy.export(directory, tokenizer_dir=prepared.model_dir)


async def _restore(config: Config, place: Place, workers: Workers) -> None:
    """Weights, optimiser and reference as at ``place``, in the engines too."""
    if place.checkpoint is not None:
        with refusals(), stage("checkpoint", "policy ranks load weights and optimiser"):
            await workers.policy.load(place.checkpoint / "policy")
        if workers.reference is not None and config.reference.refresh_every:
            async with deadline(
                config.cluster.timeouts.save_s,
                f"reference: restore from {place}",
                explain=workers.where_stuck,
            ):
                await workers.reference.load(place.checkpoint / REFERENCE)
    with stage("weight sync", "engines get the policy's weights"):
        await workers.sync.push(version=place.step)


def _resumable(config: Config, run_dir: Path) -> Path | None:
    return newest_whole(run_dir / CHECKPOINTS, _say) if config.checkpoint.resume == "auto" else None


def check_unfinished(config: Config, run_dir: Path, step: int) -> None:
    """Raises UserError where the run in ``run_dir``, of which ``step`` steps are done, has no more to do."""
    done = finished_steps(run_dir)
    if step > config.steps and done != step:
        raise UserError(
            f"`steps` = {config.steps}: {run_dir} has done {step} already; set it to {step} or more, or "
            "choose another `name`"
        )
    if step >= config.steps and done == step:
        raise UserError(
            f"{run_dir}: the run is complete ({step} steps); choose another `name`, or set "
            "checkpoint.resume=never (or, with a constant learning rate, raise `steps` to go on)"
        )


def finished_steps(run_dir: Path) -> int | None:
    """Steps of the run when everything, its last evaluation too, was done; None before."""
    done = run_dir / _DONE
    if not done.exists():
        return None
    try:
        return int(done.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{done}: expected a file with the number of steps that the run has done ({error}); remove it, "
            "and the run goes on from its last checkpoint"
        ) from error


def _print_result(run_dir: Path, final: dict[str, float]) -> None:
    """The table of the evaluation before training and of the exported model, as far as they were made."""
    if final:
        first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
        print_before_after(first if first["step"] == 0 else {}, final, str(run_dir))
    else:
        _say(f"run directory: {run_dir}")


def _say(message: str) -> None:
    print(message, flush=True)
