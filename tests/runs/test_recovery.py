"""Going back to the last checkpoint within one job: ledger and weights equal an undisturbed run's."""

import asyncio
import json
import shutil
import threading
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from actors.cluster import Cluster
from grpo_dist.config import RestartsConfig
from grpo_dist.driver import run
from grpo_dist.errors import RERUN, RunEnded, StateLost, Unhealthy
from grpo_dist.observe.tracker import LEDGER
from grpo_dist.runs.checkpoint import CHECKPOINTS, CheckpointState, ResumePoint, load_progress, newest_whole
from grpo_dist.runs.identity import data_digest, fingerprint
from grpo_dist.runs.recovery import Recovery
from grpo_dist.runs.run_directory import add_resume_settings
from grpo_dist.runs.session import Run, audit
from grpo_dist.runtime.concurrency import WINDOW_S, Budget
from grpo_dist.runtime.files import StepLines
from tests.support import fakes, made_checkpoints
from tests.support.patience import HANG_S, wait_until


class Job(fakes.World):
    """Workers, cluster and recorder of one job. Its only weight is the number of its updates."""

    def __init__(self, **config):
        super().__init__(jitter=False)
        self.config = fakes.config(
            checkpoint={"every": 2}, cluster={"restarts": {"backoff_s": 0.001}}, **config
        )
        self.weight, self.weights, self.starts, self.abandoned = 0, {}, 0, 0
        self.dies_starting = False
        self.trained = []
        self.die_at, self.metrics_at = {}, {}

    async def update(self, batches, *, kl_coef, bounds):
        step = self.version + 1
        if self.die_at.get(step):
            self.die_at[step] -= 1
            self.weight = None
            raise StateLost(f"policy-1 is lost in step {step}")
        self.weight += 1
        self.trained.append((step, self.weight))
        return {"loss/policy": 0.0, **self.metrics_at.get(step, {})}

    async def save(self, step, workers, progress):
        await super().save(step, workers, progress)
        self.weights[step] = self.weight

    async def start_again(self, model_dir):
        self.starts, self.weight = self.starts + 1, 0
        return self.workers()

    async def abandon(self):
        self.abandoned += 1

    async def where_stuck(self):
        return "nowhere"

    @asynccontextmanager
    async def failures_as_state_lost(self):
        yield

    def back_to(self, step):
        for records in (self.logged, self.ledger_entries):
            for step_later in [s for s in records if s > step]:
                del records[step_later]

    async def newest(self):
        if not self.saved:
            return ResumePoint()
        step = max(self.saved)
        return ResumePoint(Path(f"step_{step:06d}"), self.saved[step])

    async def resume(self, point, workers):
        if point.checkpoint is not None:
            self.weight = self.weights[point.step]
        await self.push(point.step)
        await run(self.config, workers, fakes.prompts(40), [], self, self, point.progress)

    async def attempts(self):
        recovery = Recovery(
            self.config.cluster, self, self, self.newest, Path("model"), first=ResumePoint(),
            start=self.start, remedy=add_resume_settings(RERUN, self.config.checkpoint, Path("runs/run-2")),
        )  # fmt: skip
        async for attempt in recovery.attempts():
            async with attempt as (point, workers):
                await self.resume(point, workers)

    def train(self):
        asyncio.run(self.attempts())
        return self

    async def start(self):
        if self.dies_starting:
            raise StateLost("a worker is lost while it starts (killed)")
        return self.workers()


@pytest.mark.parametrize("allowed", [True, False])
def test_a_worker_lost_during_the_start_does_not_end_the_run(allowed):
    job = Job()
    job.dies_starting = True
    if allowed:
        job.train()
        assert job.starts == 1 and list(job.ledger_entries) == [1, 2, 3, 4, 5, 6]
        return
    restarts = job.config.cluster.restarts.model_copy(update={"max_per_worker": 0})
    cluster = job.config.cluster.model_copy(update={"restarts": restarts})
    job.config = job.config.model_copy(update={"cluster": cluster})
    with pytest.raises(StateLost, match="lost while it starts"):
        job.train()
    assert job.starts == 0


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(("lost_step", "resume_step"), [(1, 0), (2, 0), (3, 2), (6, 4)])
def test_a_lost_policy_costs_only_the_steps_since_the_checkpoint(staleness, lost_step, resume_step):
    expected, job = Job(max_staleness=staleness).train(), Job(max_staleness=staleness)
    job.die_at = {lost_step: 1}
    job.train()
    assert job.starts == 1 and expected.starts == 0
    assert job.ledger_entries == expected.ledger_entries and list(job.ledger_entries) == [1, 2, 3, 4, 5, 6]
    assert [s for s, _ in job.trained] == [*range(1, lost_step), *range(resume_step + 1, 7)]
    assert all(step == weight for step, weight in job.trained)  # no step is trained twice
    place = f"step_{resume_step:06d}" if resume_step else "the beginning of the run"
    assert job.warnings == [
        f"policy-1 is lost in step {lost_step}; going back to the last checkpoint in 0.001 s, restart 1 of 3",
        f"resuming from {place}",
    ]


def test_waiting_for_capacity_does_not_count_towards_the_start_deadline(monkeypatch):
    job = Job()
    timeouts = {"placement_timeout_s": 60.0, "start_s": 0.05}
    job.config = fakes.config(checkpoint={"every": 2}, cluster={"timeouts": timeouts})
    job.die_at = {3: 1}
    start_again = job.start_again

    async def after_a_wait(model_dir):
        await asyncio.sleep(0.5)
        return await start_again(model_dir)

    monkeypatch.setattr(job, "start_again", after_a_wait)
    assert list(job.train().ledger_entries) == [1, 2, 3, 4, 5, 6]


def test_another_failure_during_recovery_costs_another_restart(monkeypatch):
    job, fails = Job(), iter([True, False])
    job.die_at = {3: 1}
    start_again = job.start_again

    async def lose_another(model_dir):
        if next(fails):
            raise StateLost("policy-0 is lost while it starts")
        return await start_again(model_dir)

    job.start_again = lose_another
    job.train()
    assert job.ledger_entries == Job().train().ledger_entries
    assert ["restart 1 of 3" in job.warnings[0], "restart 2 of 3" in job.warnings[2]] == [True, True]


def test_repeated_failures_end_the_run_with_their_reason():
    job = Job()
    job.die_at = {3: 10}
    with pytest.raises(StateLost, match="policy-1 is lost in step 3"):
        job.train()
    assert job.starts == 3 and list(job.ledger_entries) == [1, 2]
    assert job.warnings[-1] == (
        "policy-1 is lost in step 3 after 3 restart(s) within an hour, all of "
        "`cluster.restarts.max_per_worker`: ending; rerun the same command to resume from the last checkpoint"
    )


def test_a_run_that_never_resumes_ends_with_the_settings_that_resume_it():
    """The same command begins a new run in another directory, which uses no checkpoint."""
    job = Job()
    never = job.config.checkpoint.model_copy(update={"resume": "never"})
    job.config = job.config.model_copy(update={"checkpoint": never})
    job.die_at = {3: 10}
    with pytest.raises(StateLost):
        job.train()
    assert "; add checkpoint.resume=auto name=run-2 to it (" in job.warnings[-1]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_step_beyond_a_bound_is_rolled_back_and_its_batch_is_left_out(staleness):
    job = Job(max_staleness=staleness, health={"min_signal_groups": 0, "action": "rollback", "kl_above": 1.0})
    job.metrics_at = {4: {"ref/kl": 5.0}}
    job.train()
    assert job.starts == 0 and job.abandoned == 1  # the workers keep running
    assert [step for step, _ in job.trained] == [1, 2, 3, 4, 3, 5, 6]
    assert job.weight == 5  # six steps without the avoided one
    assert "skipped" in job.ledger_entries[4] and "trained" not in job.ledger_entries[4]
    assert all("trained" in job.ledger_entries[s] and "skipped" not in job.ledger_entries[s] for s in (3, 5))
    assert list(job.quarantined) == [4]
    assert "ref/kl = 5 is above 1" in job.warnings[0] and job.warnings[0].endswith("; rolling back")
    assert job.warnings[1:] == [
        "resuming from step_000002",
        "step 4: not trained on, the run was rolled back from it",
    ]


def test_a_batch_beyond_a_bound_is_rolled_back_once_and_then_left_out():
    """It is sampled again with the same weights and seeds, so it is beyond the bound again."""
    action = {"kind": "rollback", "max_rollbacks": 1}
    health = {"min_signal_groups": 0, "action": action, "degenerate_above": 0.5}
    uids, job = Job(health=health).train().ledger_entries[4]["trained"], Job(health=health)
    score = job.score

    async def score_degenerate(prompt, rollouts):
        group = await score(prompt, rollouts)
        return replace(group, degenerate=len(rollouts) if prompt.uid in uids else 0)

    job.score = score_degenerate
    job.train()
    assert [step for step, _ in job.trained] == [1, 2, 3, 4, 3, 5, 6]
    assert job.ledger_entries[4]["skipped"] == uids and job.logged[4]["health/alarms"] == 0.0
    assert [w.partition(":")[0] for w in job.warnings] == ["step 4", "resuming from step_000002", "step 4"]


def test_rollbacks_end_if_every_step_is_beyond_a_bound():
    job = Job(
        health={"min_signal_groups": 0, "action": {"kind": "rollback", "max_rollbacks": 2}, "kl_above": 1.0}
    )
    job.metrics_at = {step: {"ref/kl": 5.0} for step in range(1, 7)}
    with pytest.raises(Unhealthy, match=r"step 3: .*Stopped"):
        job.train()
    assert [step for step, _ in job.trained] == [1, 2, 3]
    assert job.starts == 2  # without a checkpoint the initial weights come from new ranks


def test_non_finite_weights_are_rolled_back_too():
    job = Job(health={"min_signal_groups": 0, "action": "rollback"})
    job.metrics_at = {3: {"health/bad_weights": 1.0}}
    job.train()
    assert "trained" not in job.ledger_entries[3] and job.weight == 5


@pytest.mark.parametrize("error", [ActorDiedError(), TimeoutError("stage sync: late\npolicy-0: stopped")])
def test_every_lost_or_late_worker_sends_the_run_back_to_its_checkpoint(error):
    async def lose():
        async with Cluster(fakes.config()).failures_as_state_lost():
            raise error

    with pytest.raises(StateLost) as raised:
        asyncio.run(lose())
    first, *rest = str(raised.value).splitlines()
    assert first.endswith(": restarting all workers")
    assert rest == str(error).splitlines()[1:]  # the stacks, if any


def test_a_bug_is_not_treated_as_a_lost_worker():
    async def err():
        async with Cluster(fakes.config()).failures_as_state_lost():
            raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(err())


def test_old_restarts_do_not_count():
    now = [0.0]
    budget = Budget(RestartsConfig(max_per_worker=2, backoff_s=1), clock=lambda: now[0])
    assert (budget.take(), budget.take(), budget.take()) == (1.0, 2.0, None)
    now[0] = WINDOW_S + 1
    assert budget.take() == 1.0 and budget.used == 3
    assert Budget(None).take() is None and Budget(None).spent == ""
    assert Budget(RestartsConfig(max_per_worker=0)).take() is None


def test_batches_avoided_by_a_rollback_stay_avoided_after_a_resume(tmp_path):
    job = Job(health={"min_signal_groups": 0, "action": "rollback", "kl_above": 1.0})
    job.metrics_at = {4: {"ref/kl": 5.0}}
    job.train()
    assert job.saved[2].health.avoid == () and job.saved[4].health.avoid == (4,)
    state = CheckpointState(4, "", "", health=json.loads(json.dumps(asdict(job.saved[4].health))))
    assert load_progress(tmp_path, state, []).health == job.saved[4].health


class Saved:
    async def settle(self):
        pass


@pytest.fixture
def saved_run(tmp_path):
    """Return a run with an intact and a newer, damaged checkpoint, and its warnings."""
    for step in (1, 2):
        made_checkpoints.save(tmp_path / CHECKPOINTS, step)
    (tmp_path / CHECKPOINTS / "step_000002" / "state.json").write_text("torn")
    warned = []
    inputs = SimpleNamespace(trained=made_checkpoints.PROMPTS, origin=None)
    tracker = SimpleNamespace(warn=warned.append)

    def make_run(save_s):
        config = fakes.config(cluster={"timeouts": {"save_s": save_s}})
        return Run(config, fakes.config(), inputs, tmp_path, tracker, Saved())

    return make_run, warned


def delay_search(monkeypatch, until):
    """Delay the search for checkpoints until ``until()`` is true."""

    def find_slowly(*arguments):
        place = newest_whole(*arguments)
        wait_until(until, "nobody waits for it")
        return place

    monkeypatch.setattr("grpo_dist.runs.session.newest_whole", find_slowly)


def test_reading_checkpoints_does_not_block_the_event_loop(saved_run, monkeypatch):
    """Reading takes minutes for large models; actor supervision must continue."""
    (make_run, warned), ticks = saved_run, []
    run = make_run(save_s=HANG_S)
    delay_search(monkeypatch, lambda: len(ticks) > 3)

    async def count_ticks():
        finding = asyncio.create_task(run.newest())
        while not finding.done():
            ticks.append(await asyncio.sleep(0.01))
        return await finding

    place = asyncio.run(count_ticks())
    assert place.step == 1 and len(ticks) > 3
    assert len(warned) == 1 and "damaged checkpoint" in warned[0] and "step_000002" in warned[0]


def test_checkpoints_that_are_read_too_slowly_end_the_run_and_lose_no_worker(saved_run, monkeypatch):
    """A StateLost would restart all workers and read the same files again."""
    make_run, warned = saved_run
    run, search_ended = make_run(save_s=0.5), threading.Event()
    delay_search(monkeypatch, lambda: warned and search_ended.is_set())

    async def search():
        try:
            async with Cluster(fakes.config()).failures_as_state_lost():
                await run.newest()
        finally:
            search_ended.set()

    with pytest.raises(RunEnded, match=r"not finished within 1 s; when it can be read, rerun"):
        asyncio.run(search())
    assert len(warned) == 1  # about the damaged checkpoint


def test_a_recovery_without_a_whole_checkpoint_ends_the_run_in_one_message(saved_run, tmp_path):
    make_run, warned = saved_run
    (tmp_path / CHECKPOINTS / "step_000001" / "state.json").write_text("torn")
    with pytest.raises(RunEnded, match=r"^recovery: all checkpoints of this run are damaged .* Restore one"):
        asyncio.run(make_run(save_s=HANG_S).newest())
    assert len(warned) == 2


def test_the_ledger_is_audited_against_the_last_checkpoint_and_a_wrong_one_fails_the_run(tmp_path):
    config = fakes.config(
        steps=6, max_staleness=1, checkpoint={"every": 2},
        dynamic_sampling={"enabled": True, "max_extra_prompts": 6},
    )  # fmt: skip
    job, prompts = fakes.World(), fakes.prompts(26)
    asyncio.run(run(config, job.workers(), prompts, [], job, job))
    ledger = StepLines(tmp_path / LEDGER, keep_through=0)
    for step, entry in job.ledger_entries.items():
        ledger.add(step, entry)
    for step, progress in job.saved.items():
        last = tmp_path / CHECKPOINTS / f"step_{step:06d}"
        last.mkdir(parents=True)
        order = asdict(progress.pipeline.order)
        state = CheckpointState(step, fingerprint(config), data_digest(prompts), order=order)
        (last / "state.json").write_text(json.dumps(asdict(state)))
    warned = []
    tracker = SimpleNamespace(warn=warned.append, flush=lambda: None)
    finished = SimpleNamespace(
        config=config, identity=config, directory=tmp_path, tracker=tracker,
        inputs=SimpleNamespace(prompts=prompts, dropped=[]),
    )  # fmt: skip
    totals = audit(finished)
    assert totals.startswith("ledger: ") and not warned
    complete = (tmp_path / LEDGER).read_text()
    uid = job.ledger_entries[6]["trained"][0]
    (tmp_path / LEDGER).write_text(complete.replace(f'"{uid}"', '"another"'))
    with pytest.raises(RunEnded, match=r"^ledger: .*\n.*the ledger does not balance: .*times, expected"):
        audit(finished)
    (tmp_path / LEDGER).write_text(complete)
    (last / "state.json").write_text("{")
    assert audit(finished) == totals
    assert warned.pop().startswith("the ledger cannot be checked: ")
    for directory in (last, tmp_path / CHECKPOINTS):
        shutil.rmtree(directory)
        assert audit(finished) == totals
        assert "no checkpoint of step 6" in warned.pop()
