"""Evaluation on separate engines, while the real loop trains on fake workers."""

import asyncio
from types import SimpleNamespace

import pytest

from grpo_dist.driver import run
from grpo_dist.errors import Preempted
from grpo_dist.loop.progress import Progress
from tests.support import fakes
from tests.support.fakes import EVERY_2, HELD, OwnWorld


def train(world, config, progress=None, **options):
    asyncio.run(run(config, world.workers(), fakes.prompts(40), HELD, world, world, progress, **options))


def eval_metrics(world):
    return {
        step: {name: value for name, value in metrics.items() if name.startswith("eval/")}
        for step, metrics in world.logged.items()
        if "eval/held/pass@1" in metrics
    }


def test_evaluations_have_the_numbers_and_steps_of_those_that_training_waits_for(tmp_path):
    shared, separate = fakes.World(jitter=False), OwnWorld(tmp_path)
    config = fakes.config(steps=6, evaluation=EVERY_2)
    train(shared, config)
    train(separate, config)
    assert sorted(eval_metrics(separate)) == [0, 2, 4, 6]
    assert eval_metrics(separate) == eval_metrics(shared)
    assert {version for version, _ in separate.engines.sampled} == {0, 2, 4, 6}
    assert separate.saved[6].evaluations == (6,) and separate.kept == []  # awaited, then removed


def test_training_continues_during_an_evaluation(tmp_path):
    world = OwnWorld(tmp_path)
    update = world.update

    async def update_and_release(batches, **options):
        world.engines.gate.clear()
        if len(world.updates) == 3:  # the evaluation of step 2 samples while step 4 is trained
            world.engines.gate.set()
        return await update(batches, **options)

    world.update = update_and_release
    train(world, fakes.config(steps=4, evaluation=EVERY_2 | {"before": False, "every": 2}))
    updates_done = {done for version, done in world.engines.sampled if version == 2}
    assert updates_done and min(updates_done) >= 3
    assert sorted(eval_metrics(world)) == [2, 4]


def test_training_waits_for_an_evaluation_that_runs_when_the_next_is_due_and_warns(tmp_path, monkeypatch):
    """The fake clock advances by three seconds while it waits."""
    now_s = 100.0
    clock = SimpleNamespace(perf_counter=lambda: now_s)
    monkeypatch.setattr("grpo_dist.loop.concurrent_evaluation.time", clock)
    world = OwnWorld(tmp_path)
    world.engines.gate.clear()
    phase = world.phase

    def end():
        nonlocal now_s
        now_s += 3.0
        world.engines.gate.set()

    def note_wait(name):
        if name == "evaluate":  # the loop waits
            assert len(world.updates) == 2
            asyncio.get_running_loop().call_soon(end)
        phase(name)

    world.phase = note_wait
    train(world, fakes.config(steps=2, evaluation=EVERY_2))
    assert sorted(eval_metrics(world)) == [0, 2]
    (warning,) = [text for text in world.warnings if "waited" in text]
    assert warning.startswith("step 2: waited 3.0 s for") and "`evaluation.every`" in warning
    assert [world.logged[step]["time/evaluation_wait_s"] for step in (0, 2)] == [0.0, 3.0]


def preempted(world, config):
    """Run until step 3 while the evaluation of step 2 is unfinished; return the saved progress."""
    phase = world.phase

    def stop_requested():
        return len(world.updates) >= 3

    def hold(name):
        if name == "snapshot" and len(world.updates) == 2:
            world.engines.gate.clear()
        phase(name)

    world.phase = hold
    with pytest.raises(Preempted):
        train(world, config, stop_requested=stop_requested)
    return world.saved[3]


def test_a_preempted_run_does_not_wait_and_its_resume_repeats_what_did_not_finish(tmp_path):
    config = fakes.config(steps=4, evaluation=EVERY_2)
    uninterrupted = fakes.World(jitter=False)
    train(uninterrupted, config)
    progress = preempted(stopped := OwnWorld(tmp_path), config)
    assert progress.evaluations == (2,) and sorted(eval_metrics(stopped)) == [0]
    assert stopped.kept == ["step_000002"]
    assert stopped.engines.has_snapshot(tmp_path / "evaluation/step_000002")
    resumed = OwnWorld(tmp_path)
    resumed.version, resumed.updates = 3, [None] * 3
    train(resumed, config, progress)
    assert sorted(eval_metrics(resumed)) == [2, 4]
    assert {version for version, _ in resumed.engines.sampled} == {2, 4}  # step 2: under its own weights
    assert eval_metrics(stopped) | eval_metrics(resumed) == eval_metrics(uninterrupted)
    assert "the evaluation of step 2 did not finish, and is repeated" in resumed.notes


def test_the_evaluation_before_the_first_step_runs_once_after_a_resume(tmp_path):
    """The run is preempted while it samples its first batch, and the evaluation has not finished."""
    config, world = fakes.config(steps=2, evaluation=EVERY_2), OwnWorld(tmp_path)
    world.engines.gate.clear()
    started = asyncio.Event()

    async def sample(prompt, *, seeds, sampling):
        started.set()
        await asyncio.Event().wait()  # bounded: the run ends, and cancels it

    world.sample = sample
    with pytest.raises(Preempted):
        train(world, config, stop_requested=started.is_set)
    assert world.saved[0].evaluations == (0,) and world.kept == ["step_000000"]

    resumed, logged = OwnWorld(tmp_path), []
    log = resumed.log

    def record_steps(step, metrics):
        logged.extend([step] if "eval/held/pass@1" in metrics else [])
        log(step, metrics)

    resumed.log = record_steps
    train(resumed, config, world.saved[0])
    assert logged == [0, 2]


def resumed_world(directory, step, snapshot):
    """Resume a run at ``step`` for one more, with the evaluation of step 2 pending; return its world.

    ``snapshot``: step of the weights that were kept for an evaluation.
    """
    world = OwnWorld(directory)
    world.version, world.updates = step, [None] * step
    (directory / f"evaluation/step_{snapshot:06}").mkdir(parents=True)
    train(world, fakes.config(steps=step + 1, evaluation=EVERY_2), Progress(step, evaluations=(2,)))
    return world


def test_a_resumed_run_repeats_no_evaluation_that_finished_after_its_checkpoint(tmp_path):
    world = resumed_world(tmp_path, step=2, snapshot=3)  # the run repeats this step
    assert eval_metrics(world) == {} and world.kept == []


def test_an_evaluation_whose_snapshot_was_not_written_takes_the_weights_of_the_checkpoint(tmp_path):
    assert sorted(eval_metrics(resumed_world(tmp_path, step=2, snapshot=2))) == [2]


def test_an_evaluation_whose_snapshot_is_lost_is_left_out_with_a_warning(tmp_path):
    world = resumed_world(tmp_path, step=3, snapshot=2)
    assert sorted(eval_metrics(world)) == [4]
    (warning,) = world.warnings
    assert warning.startswith("the evaluation of step 2 is left out") and "no whole snapshot" in warning


def test_a_run_that_gives_up_its_engines_of_evaluation_reports_what_it_leaves_out_and_deletes_snapshots(
    tmp_path,
):
    world = fakes.World(jitter=False)
    world.directory, world.version = tmp_path, 3
    for step in (2, 3, 1_000_000):  # the last one was due after the checkpoint
        (tmp_path / f"evaluation/step_{step:06}").mkdir(parents=True)
        (tmp_path / f"evaluation/step_{step:06}/weights.bin").write_bytes(b"weights")
    (tmp_path / "evaluation/notes").mkdir()  # not a snapshot
    train(world, fakes.config(steps=4, evaluation=EVERY_2), Progress(3, evaluations=(2, 3)))
    assert sorted(eval_metrics(world)) == [3, 4]
    assert [text.partition(" and is")[0] for text in world.warnings] == [
        "the evaluation of step 2 was not finished"
    ]
    assert [path.name for path in (tmp_path / "evaluation").iterdir()] == ["notes"]


def test_a_run_that_gives_up_its_engines_keeps_a_snapshot_until_its_evaluation_is_logged(tmp_path):
    """A run that ends earlier may get its engines back, and repeats evaluations that have a directory."""
    world = fakes.World(jitter=False)
    world.directory, world.version = tmp_path, 3
    (tmp_path / "evaluation/step_000003").mkdir(parents=True)
    config, progress = fakes.config(steps=4, evaluation=EVERY_2), Progress(3, evaluations=(3,))
    with pytest.raises(Preempted):
        train(world, config, progress, stop_requested=lambda: True)
    assert eval_metrics(world) == {} and (tmp_path / "evaluation/step_000003").is_dir()


def test_a_failure_of_an_evaluation_ends_the_loop_with_its_error(tmp_path):
    world = OwnWorld(tmp_path)
    world.engines.failure = RuntimeError("the engine has failed")
    with pytest.raises(RuntimeError, match="the engine has failed"):
        train(world, fakes.config(steps=6, evaluation=EVERY_2))
    assert 6 not in world.saved
