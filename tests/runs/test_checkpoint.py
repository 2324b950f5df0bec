"""Checkpoint directories: complete or absent, pruned to the newest, refused if they do not fit the run."""

import asyncio
import dataclasses
import errno
import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from grpo_dist.algorithms.moments import Moments
from grpo_dist.cli import main
from grpo_dist.config.files import dump_config
from grpo_dist.data.order import OrderState
from grpo_dist.errors import UserError
from grpo_dist.health import HealthState
from grpo_dist.loop.progress import PipelineState, Progress, SampledBatch, ScheduleState
from grpo_dist.runs.checkpoint import (
    CHECKPOINTS,
    Checkpoints,
    CheckpointState,
    changes_since,
    check_data,
    check_models,
    checkpoint_damage,
    find_resume_state,
    list_checkpoints,
    load_progress,
    load_resume_point,
    load_state,
    newest_whole,
    other_layout,
    recorded_changes,
    remove_partial,
    why_ended_early,
    write_manifest,
)
from grpo_dist.runs.identity import DataOrigin, data_digest
from grpo_dist.tools.submit.checks import check_resumes
from grpo_dist.types import Sampling
from tests.support import fakes
from tests.support.made_checkpoints import HEALTH, MOMENTS, ORDER, PROMPTS, Disk, group, save, whole
from tests.support.patience import HANG_S
from tests.support.tiers import slow_after


def saved(directory, step=1, **options):
    """Save a checkpoint, the only one of ``directory``; return its path."""
    save(directory, step, **options)
    (checkpoint,) = list_checkpoints(directory)
    return checkpoint


def test_a_saved_checkpoint_is_found(tmp_path):
    checkpoint = saved(tmp_path, 3, ahead={3: SampledBatch([group(PROMPTS[1])], [group(PROMPTS[3])])})
    state = load_state(checkpoint, fakes.config())
    assert state.step == 3
    check_data(checkpoint, state, PROMPTS)
    progress = load_progress(checkpoint, state, PROMPTS)
    pipeline = progress.pipeline
    assert progress.step == 3 and progress.kl_coef == 0.25
    batch = pipeline.ahead[3]
    (restored,), (discarded,) = batch.groups, batch.discarded
    assert restored.prompt is PROMPTS[1] and discarded.prompt is PROMPTS[3]
    assert [g.prompt for g in pipeline.partial[4]] == [PROMPTS[0]] and list(pipeline.partial) == [4]
    assert pipeline.order_indices == {3: [1, 0], 12: [2]} and pipeline.order == ORDER
    assert progress.health == HEALTH and progress.rewards == MOMENTS
    assert restored.baseline_reward == 0.5
    assert restored.rollouts[0].logprobs.tolist() == [-0.5, -0.25]


def test_a_checkpoint_without_watch_and_order_state_restores_empty_ones(tmp_path):
    progress = load_progress(tmp_path, CheckpointState(1, "", "", health={"best_reward": 0.5}), PROMPTS)
    assert progress.health == HealthState(0.5) and progress.pipeline.order == OrderState()
    assert progress.rewards == Moments()


def test_a_checkpoint_of_another_version_is_not_deleted(tmp_path):
    checkpoint = saved(tmp_path, 3)
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"chosen": {}}))
    with pytest.raises(ValueError, match=r"another version of .*chosen.*; resume with that") as refusal:
        load_state(checkpoint, fakes.config())
    assert "delete" not in str(refusal.value)


def test_a_failed_save_leaves_no_checkpoint_and_does_not_block_the_next(tmp_path):
    with pytest.raises(RuntimeError, match="disk full"):
        save(tmp_path, 1, fails=True)
    assert list_checkpoints(tmp_path) == []
    save(tmp_path, 1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000001"]


def test_a_background_checkpoint_is_written_during_later_steps_and_the_next_one_waits_for_it(tmp_path):
    async def steps():
        checkpoints, writing = Checkpoints(tmp_path, fakes.config(), PROMPTS), asyncio.Event()
        await checkpoints.save(1, Disk(writing=writing), Progress())  # does not wait
        assert list_checkpoints(tmp_path) == []
        second = asyncio.create_task(checkpoints.save(2, Disk(), Progress()))
        await asyncio.sleep(0.05)
        assert not second.done() and list_checkpoints(tmp_path) == []
        writing.set()
        await second
        assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000001"]
        await checkpoints.settle()
        assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000001", "step_000002"]
        await checkpoints.settle()  # nothing remains to wait for

    asyncio.run(steps())


@pytest.mark.parametrize("repeats", [False, True])
def test_a_checkpoint_that_is_late_does_not_appear_once_the_run_has_gone_back(tmp_path, monkeypatch, repeats):
    """Neither as a new checkpoint, nor as a replacement for one of the same step with other groups."""
    slow = fakes.config(cluster={"timeouts": {"save_s": 0.2}})
    may_end, publish_ended = threading.Event(), threading.Event()
    publish = Checkpoints._publish

    def slow_manifest(partial):
        write_manifest(partial)
        may_end.wait(HANG_S)

    def publish_and_signal(self, *how):
        publish(self, *how)
        publish_ended.set()

    async def late():
        first, second = (Checkpoints(tmp_path, config, PROMPTS) for config in (fakes.config(), slow))
        await whole(first, 20 if repeats else 10, Disk(), Progress(10, kl_coef=0.25))
        publish_ended.clear()
        monkeypatch.setattr("grpo_dist.runs.checkpoint.write_manifest", slow_manifest)
        with pytest.raises(TimeoutError, match="step_000020 is published"):
            await whole(second, 20, Disk(), Progress(20, kl_coef=0.5))
        may_end.set()
        await asyncio.to_thread(publish_ended.wait, HANG_S)

    monkeypatch.setattr(Checkpoints, "_publish", publish_and_signal)
    asyncio.run(late())
    assert publish_ended.is_set() and [p.name for p in list_checkpoints(tmp_path)] == [
        "step_000020" if repeats else "step_000010"
    ]
    newest = newest_whole(tmp_path, print)
    assert json.loads((newest / "state.json").read_text())["kl_coef"] == 0.25


def test_a_save_that_is_cancelled_does_not_appear_once_the_run_has_gone_back(tmp_path, monkeypatch):
    """A save for a drained node is cancelled if the batch in flight fails."""
    config = fakes.config(checkpoint={"background": False})
    write_begun, may_end, publish_ended = threading.Event(), threading.Event(), threading.Event()
    publish = Checkpoints._publish

    def slow_manifest(partial):
        write_begun.set()
        may_end.wait(HANG_S)
        write_manifest(partial)

    def publish_and_signal(self, *how):
        publish(self, *how)
        publish_ended.set()

    async def cancelled():
        saving = asyncio.create_task(Checkpoints(tmp_path, config, PROMPTS).save(3, Disk(), Progress(3)))
        assert await asyncio.to_thread(write_begun.wait, HANG_S)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        may_end.set()
        assert await asyncio.to_thread(publish_ended.wait, HANG_S)

    monkeypatch.setattr("grpo_dist.runs.checkpoint.write_manifest", slow_manifest)
    monkeypatch.setattr(Checkpoints, "_publish", publish_and_signal)
    asyncio.run(cancelled())
    assert list_checkpoints(tmp_path) == []


def test_a_foreground_checkpoint_exists_before_the_loop_continues(tmp_path):
    config = fakes.config(checkpoint={"background": False})
    asyncio.run(Checkpoints(tmp_path, config, PROMPTS).save(1, Disk(), Progress()))
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000001"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_later_checkpoint_of_a_step_replaces_the_earlier_one_atomically(tmp_path, monkeypatch, swaps):
    """It has more sampled groups, and the step always has a checkpoint. If names cannot be exchanged, the
    earlier one stays, unless it is damaged.
    """
    if not swaps:
        monkeypatch.setattr("grpo_dist.runs.checkpoint.exchange", lambda one, other: False)
    saved_path = saved(tmp_path)
    first = (saved_path / "manifest.json").stat().st_ino
    save(tmp_path, 1, ahead={3: SampledBatch([group(PROMPTS[1])])})
    assert ((saved_path / "manifest.json").stat().st_ino != first) == (saved_path / "ahead").exists() == swaps
    assert checkpoint_damage(saved_path) is None and [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    (saved_path / "state.json").write_text("{}")
    save(tmp_path, 1, ahead={3: SampledBatch([group(PROMPTS[1])])})
    assert checkpoint_damage(saved_path) is None and (saved_path / "ahead").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_leftovers_of_a_killed_or_failed_save_are_removed(tmp_path):
    (tmp_path / ".partial_step_000007_0").mkdir()
    (tmp_path / "mine").mkdir()
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / ".partial_step_000007_0").mkdir()  # whose rank was lost during the write
    save(tmp_path, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step_000008"]


def test_only_the_newest_checkpoints_are_kept_and_no_other_file_is_deleted(tmp_path):
    (tmp_path / "mine").mkdir()
    config = fakes.config(checkpoint={"keep": 2})
    for step in (2, 4, 10, 100):
        save(tmp_path, step, config=config)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "step_000010", "step_000100"]


def test_a_checkpoint_that_is_deleted_is_whole_until_it_is_gone(tmp_path, monkeypatch):
    config = fakes.config(checkpoint={"keep": 1})
    save(tmp_path, 2, config=config)
    during = []

    class Killed(BaseException):
        pass

    def die(path, **_):
        during.append((list_checkpoints(tmp_path), (path / "state.json").exists()))
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", die)
        save(tmp_path, 4, config=config)
    assert during == [([tmp_path / "step_000004"], True)]
    save(tmp_path, 6, config=config)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000006"]


def test_a_replaced_checkpoint_that_cannot_be_deleted_is_named_and_ends_no_run(tmp_path, monkeypatch, caplog):
    """On NFS the directory of an open file cannot be removed."""

    def busy(*_, **__):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    config = fakes.config(checkpoint={"keep": 1})
    save(tmp_path, 2, config=config)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        for step in (2, 4, 2, 6):  # 4 and 6 delete step 2
            save(tmp_path, step, config=config)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000006"]
    named = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert named == [str(tmp_path / f".partial_{name}") for name in (
        "step_000002_0", "deleted_step_000002", "deleted_step_000002-2", "deleted_step_000004"
    )]  # fmt: skip
    save(tmp_path, 8, config=config)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000008"]


def test_a_run_that_its_best_evaluation_has_ended_is_complete(tmp_path):
    """Unless a new setting lets it go on, or another measure makes the best one void."""

    def config(**changes):
        checkpoint = {"keep_best": "eval/held/pass@1", "patience": 1} | changes.pop("checkpoint", {})
        held = {"train": [{"path": "demo:add3"}], "eval": [{"path": "demo:add4", "name": "held"}]}
        sections = {"data": held, "evaluation": {"every": 2} | changes.pop("evaluation", {})}
        return fakes.config(steps=9, checkpoint=checkpoint, **sections, **changes)

    directory = tmp_path / CHECKPOINTS
    asyncio.run(whole(Checkpoints(directory, config(), PROMPTS), 6, Disk(), Progress(6, best=(4, 0.5))))
    resume = partial(find_resume_state, run_dir=tmp_path, say=lambda _: None)
    goes_on = [
        config(checkpoint={"patience": 2}), config(checkpoint={"patience": None, "target": 0.6}),
        config(evaluation={"temperature": 0.5}),
    ]  # fmt: skip
    assert resume(config(), config())[1].step == 6  # not finished: its export may be missing
    (tmp_path / "DONE").write_text("6\n")
    words = r"run is complete \(6 steps: .* 0.5 of step 4 was not exceeded by 1 .*patience.*change that"
    with pytest.raises(UserError, match=words):
        resume(config(), config())
    with pytest.raises(UserError, match=words):
        check_resumes(config(), tmp_path)
    for changed in goes_on:
        assert resume(changed, changed)[1].step == 6
        check_resumes(changed, tmp_path)
    (directory / "step_000006/state.json").write_text("torn")
    assert why_ended_early(config(), tmp_path) == ""


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    config = fakes.config(checkpoint={"keep": 1})
    for step, best in ((2, None), (4, (4, 0.5)), (6, (4, 0.5)), (8, (4, 0.5))):
        checkpoints = Checkpoints(tmp_path, config, PROMPTS)
        asyncio.run(whole(checkpoints, step, Disk(), Progress(step, best=best)))
    remaining = list_checkpoints(tmp_path)
    assert [path.name for path in remaining] == ["step_000004", "step_000008"]
    state = load_state(remaining[-1], config)
    assert load_progress(remaining[-1], state, PROMPTS).best == (4, 0.5)


def with_source(**algorithm):
    train = [{"path": "a.jsonl", "algorithm": algorithm}]
    return {"data": {"train": train}, "algorithm": {"kl": {"coef": 0.1}}}


def with_set(path):
    return {"data": {"train": [{"path": "a.jsonl"}], "eval": [{"path": path}]}}


def with_reward(weight):
    reward = {"function": "exact", "weight": weight}
    return with_set("held.jsonl") | {"rewards": {"by_source": {"held": {"functions": [reward]}}}}


CHANGES = {
    "data.train.0.algorithm.kl.coef": (with_source(kl={"coef": 0.2}), with_source(kl={"coef": 0.0})),
    "data.train.0.algorithm.loss.clip_high": (
        with_source(loss={"clip_high": 0.2}),
        with_source(loss={"clip_high": 0.28}),
    ),
    "policy.optimizer.lr": ({"policy": {"optimizer": {"lr": 1e-6}}}, {"policy": {"optimizer": {"lr": 5e-7}}}),
    "algorithm.kl.coef": ({"algorithm": {"kl": {"coef": 0.1}}}, {"algorithm": {"kl": {"coef": 0.2}}}),
    "sampling.max_new_tokens": ({"sampling": {"max_new_tokens": 9}}, {"sampling": {"max_new_tokens": 5}}),
    "health.min_signal_groups": ({}, {"health": {"min_signal_groups": 2}}),
    "data.eval.0.path": (with_set("held.jsonl"), with_set("other.jsonl")),
    "rewards.by_source.held.functions.0.weight": (with_reward(1), with_reward(2)),
    "evaluation.every": ({"evaluation": {"every": 2}}, {"evaluation": {"every": 3}}),
    "evaluation.temperature": (
        {"evaluation": {"every": 2}},
        {"evaluation": {"every": 2, "temperature": 0.5}},
    ),
}


@pytest.mark.parametrize("key", CHANGES)
def test_some_settings_may_change_and_each_change_is_recorded(tmp_path, key):
    old, new = (fakes.config(**changed) for changed in CHANGES[key])
    checkpoints = Checkpoints(tmp_path, old, PROMPTS)
    sampling = {7: Sampling(max_new_tokens=9)}
    progress = Progress(7, PipelineState(sampling=sampling), kl_coef=0.15, best=(4, 0.5))
    asyncio.run(whole(checkpoints, 7, Disk(), progress))
    (checkpoint,) = list_checkpoints(tmp_path)
    assert list(recorded_changes(changes_since(checkpoint, old), 7)) == []
    (message,) = recorded_changes(changes_since(checkpoint, new), 7)
    assert message.startswith(f"after step 7 `{key}` = ") and ", before " in message
    resumed = load_progress(checkpoint, load_state(checkpoint, new), PROMPTS)
    assert resumed.kl_coef == (None if key == "algorithm.kl.coef" else 0.15)
    assert resumed.pipeline.sampling[7].max_new_tokens == (5 if key == "sampling.max_new_tokens" else 9)
    is_other_measure = key.startswith(("data.eval.0.path", "evaluation.temperature", "rewards."))
    assert resumed.best == (None if is_other_measure else (4, 0.5))


ADAPTIVE = {"kind": "adaptive", "start": 4, "largest": 16}


@pytest.mark.parametrize(
    ("setting", "length"),
    [
        (ADAPTIVE | {"patience": 5}, 12),
        (ADAPTIVE | {"largest": 10}, 10),
        (ADAPTIVE | {"start": 14}, 14),
        ({"schedule": [[0, 4], [2, 8]]}, None),
        (9, None),
    ],
)
def test_an_adapted_length_is_kept_within_the_new_limits(tmp_path, setting, length):
    old, new = (fakes.config(sampling={"max_new_tokens": s}) for s in (ADAPTIVE, setting))
    pipeline = PipelineState(schedule=ScheduleState(None, 12, 1))
    asyncio.run(whole(Checkpoints(tmp_path, old, PROMPTS), 7, Disk(), Progress(7, pipeline)))
    (checkpoint,) = list_checkpoints(tmp_path)
    resumed = load_progress(checkpoint, load_state(checkpoint, new), PROMPTS)
    assert resumed.pipeline.schedule == ScheduleState(None, length, 1)


def test_a_new_held_out_set_is_one_event_and_its_code_is_not_code_of_the_run(tmp_path):
    """Its reward is another."""
    train = {"train": [{"path": "a.jsonl"}]}
    rewards = {"by_source": {"held": {"functions": ["my_sets:graded"]}}}
    old = fakes.config(data=train)
    new = fakes.config(data=train | {"eval": [{"path": "my_sets:held"}]}, rewards=rewards)
    asyncio.run(whole(Checkpoints(tmp_path, old, PROMPTS), 7, Disk(), Progress(7)))
    (checkpoint,) = list_checkpoints(tmp_path)
    assert load_state(checkpoint, new).step == 7
    changes = list(recorded_changes(changes_since(checkpoint, new), 7))
    assert changes == [
        "after step 7 `data.eval.0.path` = my_sets:held, before None",
        "after step 7 `rewards.by_source.held.functions.0.function` = my_sets:graded, before None",
    ]


def test_a_change_that_would_make_numbers_wrong_is_refused_with_its_reason(tmp_path):
    checkpoint = saved(tmp_path)
    for changed, words in (
        ({"batch": {"prompts_per_step": 2}}, "counts prompts and updates in such batches"),
        ({"algorithm": {"kl": {"coef": 0.1}}}, "would be of two algorithms"),
        ({"seed": 5}, "samples and orders of the steps so far follow from it"),
    ):
        with pytest.raises(ValueError, match=words):
            load_state(checkpoint, fakes.config(**changed))


def test_a_damaged_state_is_named(tmp_path):
    checkpoint = saved(tmp_path)
    (checkpoint / "state.json").write_text('{"step": 1')
    with pytest.raises(ValueError, match=r"step_000001: state\.json cannot be read"):
        load_state(checkpoint, fakes.config())


def test_another_configuration_does_not_resume_and_a_longer_run_does(tmp_path):
    checkpoint = saved(tmp_path)
    assert load_state(checkpoint, fakes.config(steps=60)).step == 1
    with pytest.raises(ValueError, match="made with another configuration"):
        load_state(checkpoint, fakes.config(seed=5))


def with_sft(path="sft", **sft):
    section = {"model": "demo:tiny", "data": "demo:add3"} | sft
    return fakes.config(model={"path": path}, sft=section)


@pytest.mark.slow
def test_settings_of_the_cold_start_are_part_of_the_identity_if_there_is_one(tmp_path):
    checkpoint = saved(tmp_path, config=with_sft())
    assert load_state(checkpoint, with_sft(validate_every=2)).step == 1
    with pytest.raises(ValueError, match="made with another configuration"):
        load_state(checkpoint, with_sft(steps=3))
    checkpoint = saved(tmp_path / "none", config=with_sft("demo:tiny"))
    assert load_state(checkpoint, with_sft("demo:tiny", steps=3)).step == 1


def test_a_run_may_have_an_identity_that_outlives_its_paths(tmp_path):
    identity = fakes.config(model={"path": "stage:cold"})
    checkpoints = Checkpoints(tmp_path, fakes.config(model={"path": "here"}), PROMPTS, identity=identity)
    asyncio.run(whole(checkpoints, 1, Disk(), Progress()))
    (checkpoint,) = list_checkpoints(tmp_path)
    assert load_state(checkpoint, identity).step == 1
    assert "path: here" in (checkpoint / "config.yaml").read_text()


def test_other_training_prompts_do_not_resume(tmp_path):
    checkpoint = saved(tmp_path)
    state = load_state(checkpoint, fakes.config())
    changed = dataclasses.replace(PROMPTS[2], token_ids=np.array([1, 2, 4], np.int32))
    for prompts in (PROMPTS[:3], PROMPTS[::-1], [*PROMPTS[:2], changed, PROMPTS[3]]):
        with pytest.raises(ValueError, match="made with other training prompts"):
            check_data(checkpoint, state, prompts)


def test_edited_columns_of_the_same_prompts_do_not_resume(tmp_path):
    """Unit tests, rubrics and scorers' entries: they would change the rewards of the rest of the run."""

    def with_tests(text):
        return [dataclasses.replace(p, columns={"tests": {"code": text, "n": 1}}) for p in PROMPTS]

    asyncio.run(whole(Checkpoints(tmp_path, fakes.config(), with_tests("f(1) == 1")), 1, Disk(), Progress()))
    (checkpoint,) = list_checkpoints(tmp_path)
    state = load_state(checkpoint, fakes.config())
    assert load_resume_point(checkpoint, state, with_tests("f(1) == 1")).step == 1
    with pytest.raises(ValueError, match=r"other columns of the training prompts.*`data\.train` have"):
        load_resume_point(checkpoint, state, with_tests("f(1) == 2"))
    earlier = dataclasses.replace(state, columns=None)  # from a version without the digest
    assert load_resume_point(checkpoint, earlier, with_tests("f(1) == 2")).step == 1


# --- loading verifies the files


def torn(path):
    path.write_bytes(path.read_bytes()[:-1])


def changed(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "file", ["policy/weights", "state.json", "config.yaml", "ahead/batch_000003.parquet"]
)
@pytest.mark.parametrize(
    ("damage", "words"),
    [(torn, "bytes instead of"), (changed, "its checksum differs"), (Path.unlink, "is missing")],
)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(tmp_path, file, damage, words):
    for step in (3, 6):
        save(tmp_path, step, ahead={3: SampledBatch([group(PROMPTS[1])])})
    older, newer = list_checkpoints(tmp_path)
    messages = []
    assert newest_whole(tmp_path, messages.append) == newer and not messages
    damage(newer / file)
    assert newest_whole(tmp_path, messages.append) == older
    (warning,) = messages
    assert warning.startswith(f"warning: damaged checkpoint, not used: {newer}: {file}") and words in warning


def test_a_checkpoint_without_its_manifest_is_damaged(tmp_path):
    checkpoint = saved(tmp_path)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"all checkpoints .* are damaged.*manifest\.json cannot be read"):
        newest_whole(tmp_path, print)


def listing(**files):
    return json.dumps({"files": {name: {"bytes": 8, "blake2b": "0" * 32} for name in ("state.json", *files)}})


def piped(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


HOSTILE = {
    "absolute": lambda at: (at / "manifest.json").write_text(listing(**{"/etc/passwd": 1})),
    "outside": lambda at: (at / "manifest.json").write_text(listing(**{"policy/../../x": 1})),
    "deep": lambda at: (at / "manifest.json").write_text('{"files":' + "[" * 200_000 + "]" * 200_000 + "}"),
    "of another kind": lambda at: (at / "manifest.json").write_text('{"files": {"state.json": 3}}'),
    "a list": lambda at: (at / "manifest.json").write_text("[1]"),
    "no text": lambda at: (at / "manifest.json").write_bytes(b"\xff\xfe"),
    "a pipe": lambda at: piped(at / "manifest.json"),
    "a device": lambda at: ((at / "manifest.json").unlink(), (at / "manifest.json").symlink_to("/dev/zero")),
    "a directory": lambda at: ((at / "manifest.json").unlink(), (at / "manifest.json").mkdir()),
    "no files": lambda at: (at / "manifest.json").write_text('{"files": {}}'),
    "no state": lambda at: (at / "manifest.json").write_text(
        json.dumps({"files": {k: v for k, v in json.loads((at / "manifest.json").read_text())["files"].items()
                              if k != "state.json"}})
    ),
    "no name": lambda at: (at / "manifest.json").write_text(listing(**{"\ud800\0\n": 1})),
    "a long name": lambda at: (at / "manifest.json").write_text(listing(**{"x" * 5000: 1})),
    "a file that is a pipe": lambda at: piped(at / "policy/weights"),
    "a file that is a device": lambda at: (
        (at / "policy/weights").unlink(), (at / "policy/weights").symlink_to("/dev/zero"),
    ),
    "no directory": lambda at: (shutil.rmtree(at), piped(at)),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_any_unreadable_checkpoint_falls_back_to_the_previous_one(tmp_path, kind):
    for step in (3, 6):
        save(tmp_path, step)
    older, newer = list_checkpoints(tmp_path)
    HOSTILE[kind](newer)
    messages = []
    assert newest_whole(tmp_path, messages.append) == older
    (warning,) = messages
    assert warning.startswith(f"warning: damaged checkpoint, not used: {newer}: ")
    assert "\n" not in warning and warning.encode()


def test_a_state_nested_too_deep_is_refused_in_one_message(tmp_path):
    checkpoint = saved(tmp_path)
    (checkpoint / "state.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        load_state(checkpoint, fakes.config())


def test_links_in_place_of_saved_files_are_not_followed(tmp_path):
    directory, target = tmp_path / "checkpoints", tmp_path / "other"
    save(directory, 1, config=fakes.config(checkpoint={"keep": 1}))
    target.mkdir()
    (target / "precious").touch()
    for name in (".partial_step_000002_0", "step_000002"):
        (directory / name).symlink_to(target)
    save(directory, 2, config=fakes.config(checkpoint={"keep": 1}))
    assert [path.name for path in directory.iterdir()] == ["step_000002"]
    assert not (directory / "step_000002").is_symlink()
    assert [path.name for path in target.iterdir()] == ["precious"]


def test_a_step_whose_checkpoint_was_moved_and_linked_can_be_saved_again(tmp_path):
    directory, disk = tmp_path / "checkpoints", tmp_path / "disk"
    save(directory, 2)
    (directory / "step_000002").rename(disk)
    (directory / "step_000002").symlink_to(disk)
    save(directory, 2, ahead={2: SampledBatch([group(PROMPTS[1])], [])})
    assert [path.name for path in directory.iterdir()] == ["step_000002"]
    newest = newest_whole(directory, print)
    assert not newest.is_symlink() and (newest / "ahead/batch_000002.parquet").is_file()
    assert checkpoint_damage(disk) is None
    assert not (disk / "ahead/batch_000002.parquet").exists()


def test_a_run_that_fell_back_from_a_damaged_checkpoint_keeps_its_own(tmp_path):
    """Step 6 is damaged; with `keep: 1`, pruning must not delete step 4."""
    config = fakes.config(checkpoint={"keep": 1})
    save(tmp_path, 6, config=config)
    torn(tmp_path / "step_000006" / "policy" / "weights")
    save(tmp_path, 3, config=config)
    save(tmp_path, 4, config=config)
    assert newest_whole(tmp_path, print) == tmp_path / "step_000004"
    save(tmp_path, 6, config=config)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000006"]
    assert newest_whole(tmp_path, print) == tmp_path / "step_000006"


def test_a_run_without_an_intact_checkpoint_is_refused_before_anything_starts(tmp_path, capsys):
    config = fakes.config(name="torn", output_dir=str(tmp_path))
    save(tmp_path / "torn" / "checkpoints", 3, config=config)
    torn(tmp_path / "torn" / "checkpoints" / "step_000003" / "policy" / "weights")
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert main(["train", str(file)]) == 2
    out, err = capsys.readouterr()
    assert "step_000003: policy/weights has 0 bytes instead of 1" in err and "Traceback" not in err
    assert "warning: damaged checkpoint, not used" in out


@pytest.mark.parametrize(
    ("section", "key", "value"),
    slow_after([("policy", "num_workers", 2), ("policy", "zero_stage", 3), ("rollout", "num_workers", 3),
     ("reference", "micro_batch_tokens", 512), ("policy", "offload", {"optimizer": "cpu"})], 2),
)  # fmt: skip
def test_the_layout_of_workers_may_change_on_resume_and_is_reported(tmp_path, section, key, value):
    path = saved(tmp_path)
    old = getattr(getattr(fakes.config(), section), key)
    other = fakes.config(**{section: {key: value}})
    assert load_state(path, other).step == 1 and other_layout(changes_since(path, fakes.config())) == ""
    name, value, old = ("offload.optimizer", "cpu", "none") if key == "offload" else (key, value, old)
    words = f", with another layout (`{section}.{name}` = {value} was {old}): results differ by rounding only"
    assert other_layout(changes_since(path, other)) == words


@pytest.mark.parametrize("on_disk_before", [False, True])
def test_states_on_rank_local_disks_are_not_resharded(tmp_path, on_disk_before):
    def config(nvme, **policy):
        offload = {"optimizer": "nvme", "nvme_path": str(tmp_path)} if nvme else {}
        return fakes.config(policy={"zero_stage": 3, "offload": offload} | policy)

    checkpoint = saved(tmp_path / "run", config=config(on_disk_before))
    assert load_state(checkpoint, config(on_disk_before)).step == 1
    for other in (config(not on_disk_before), config(True, num_workers=8)):
        with pytest.raises(ValueError, match=r"step_000001: .* states on NVMe disks .* cannot be resharded"):
            load_state(checkpoint, other)


def test_health_bounds_may_change_on_resume_and_training_data_may_not(tmp_path):
    checkpoint = saved(tmp_path)
    assert load_state(checkpoint, fakes.config(health={"min_signal_groups": 0, "kl_above": None})).step == 1
    with pytest.raises(
        ValueError, match=r"\(`data\.order\.name` = length was epochs: the checkpoint has a position"
    ):
        load_state(checkpoint, fakes.config(data={"train": [{"path": "demo:add3"}], "order": "length"}))


def test_other_weights_of_a_frozen_model_are_a_warning_and_under_adapters_refused(tmp_path):
    began = {"model.path": "aa", "distillation.teachers.large.model": "bb"}
    asyncio.run(whole(Checkpoints(tmp_path, fakes.config(), PROMPTS, models=began), 7, Disk(), Progress(7)))
    (checkpoint,) = list_checkpoints(tmp_path)
    state = load_state(checkpoint, fakes.config())
    plain, adapted = fakes.config(), fakes.config(policy={"lora": {"rank": 4}})
    with_kl = fakes.config(algorithm={"kl": {"coef": 0.1}})
    now = began | {"model.path": "other"}
    assert check_models(checkpoint, state, began, adapted) == []
    assert check_models(checkpoint, state, now, plain) == []  # nothing reads the initial weights again
    (warning,) = check_models(checkpoint, state, now, with_kl)
    assert warning.startswith("warning: `model.path` has other weights than when the run began: from step 7")
    (warning,) = check_models(checkpoint, state, dict.fromkeys(began, "other"), plain)
    assert warning.startswith("warning: `distillation.teachers.large.model` has other weights")
    with pytest.raises(ValueError, match=r"`model.path` = .* the checkpoint has adapters for those"):
        check_models(checkpoint, state, now, adapted)
    earlier = dataclasses.replace(state, models={})  # of a version that did not record them
    assert check_models(checkpoint, earlier, now, adapted) == []


def test_a_file_is_not_to_blame_where_its_rows_are_the_same(tmp_path):
    """Its prompts have other tokens: another date, tokenizer or tokenizer version."""
    origin = DataOrigin("rows", {"version of tokenizers": "0.22"})
    state = CheckpointState(1, "", data_digest(PROMPTS[:2]), origin=dataclasses.asdict(origin))
    changed = [dataclasses.replace(p, token_ids=p.token_ids + 1) for p in PROMPTS[:2]]
    with pytest.raises(
        ValueError, match=r"made of the same rows.* version of tokenizers was 0\.22 and is 0\.23"
    ):
        check_data(tmp_path, state, changed, DataOrigin("rows", {"version of tokenizers": "0.23"}))
    with pytest.raises(ValueError, match=r"made of the same rows.*the tokenizer gives them otherwise"):
        check_data(tmp_path, state, changed, origin)
    with pytest.raises(ValueError, match=r"the files behind `data\.train`, or their paths, have"):
        check_data(tmp_path, state, changed, DataOrigin("other rows", origin.reading))
    check_data(tmp_path, state, PROMPTS[:2], DataOrigin("other rows", {}))
