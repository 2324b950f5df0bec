"""When a policy node is being drained, the state is saved at once, and the run continues."""

import asyncio
from dataclasses import replace

import pytest

from grpo_dist.config import DynamicSamplingConfig
from grpo_dist.driver import run
from grpo_dist.errors import Preempted
from tests.support import fakes
from tests.support.fakes import EVERY_2, HELD, OwnWorld
from tests.support.patience import HANG_S


class Leaving(fakes.World):
    """Nodes in ``leaving`` are being drained."""

    def __init__(self):
        super().__init__(jitter=False)
        self.leaving, self.saves = set(), []

    def workers(self, reference=False):
        return replace(super().workers(reference), leaving_nodes=lambda: frozenset(self.leaving))

    async def save(self, step, workers, progress):
        self.saves.append(step)
        await super().save(step, workers, progress)


def train(world, **changes):
    config = fakes.config(checkpoint={"every": 0}, **{"steps": 6} | changes)
    asyncio.run(run(config, world.workers(), fakes.prompts(40), [], world, world))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_in_whose_update_a_node_is_drained_is_saved_and_the_next_are_not(staleness):
    class Drained(Leaving):
        async def update(self, batches, **options):
            if len(self.updates) == 1:
                self.leaving = {"a"}
            if len(self.updates) == 3:
                self.leaving |= {"b"}
            return await super().update(batches, **options)

    world = Drained()
    train(world, max_staleness=staleness)
    assert world.saves == [2, 4, 6]
    assert [w.split(" is saved")[0] for w in world.warnings] == [
        "node a of the policy is drained: the state after step 2",
        "node b of the policy is drained: the state after step 4",
    ]


class Waiting(Leaving):
    """The samples of the third step wait; once the run waits for them, a node is drained."""

    def __init__(self, drains):
        super().__init__()
        self.drains, self.requests = drains, 0

    def phase(self, name):
        super().phase(name)
        if self.drains and name == "sample" and len(self.updates) == 2:
            self.leaving = {"a"}

    async def sample(self, prompt, **request):
        self.requests += 1
        while self.drains and self.requests > 8 and not self.saves:
            await asyncio.sleep(0.01)
        return await super().sample(prompt, **request)


@pytest.mark.parametrize(("staleness", "order"), [(0, "launched"), (2, "launched"), (2, "completion")])
def test_a_node_that_is_drained_while_samples_are_missing_has_the_step_before_saved(staleness, order):
    """The drained node changes no number of the run."""
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "order": order}
    world, plain = Waiting(drains=True), Waiting(drains=False)
    for any_world in (world, plain):
        train(any_world, max_staleness=staleness, batch=batch, weight_sync={"mode": "keep"})
    assert world.saves == [2, 6] and plain.saves == [6]
    assert world.saved[2].step == 2
    assert sorted(uid for uid, *_ in world.sampled) == sorted(uid for uid, *_ in plain.sampled)
    if order == "launched":
        assert world.ledger_entries == plain.ledger_entries


def test_what_is_in_a_checkpoint_already_is_not_saved_again():
    """Neither the initial model nor the checkpoint of a resume is saved again; the first step is."""
    world = Waiting(drains=True)
    world.leaving, world.requests = {"a"}, 8

    async def release():
        await asyncio.sleep(0.5)
        assert world.saves == []
        world.drains = False

    async def session():
        config = fakes.config(steps=2, checkpoint={"every": 0})
        await asyncio.gather(release(), run(config, world.workers(), fakes.prompts(40), [], world, world))

    asyncio.run(session())
    assert world.saves == [1, 2]


class Colocated(Waiting):
    """Colocated policy and engines: a save waits until no sample of the third step is in flight. The samples
    wait until ``released``, or are cancelled.
    """

    def __init__(self, fails=False):
        super().__init__(drains=True)
        self.sampling, self.released, self.fails = 0, asyncio.Event(), fails
        self.asked, self.updates_at_saves = False, []

    async def sample(self, prompt, **request):
        self.requests += 1
        self.sampling += 1
        try:
            if self.requests > 8:
                await self.released.wait()
            return await fakes.World.sample(self, prompt, **request)
        finally:
            self.sampling -= 1

    async def save(self, step, workers, progress):
        self.asked = True
        while self.sampling and not self.fails:
            await asyncio.sleep(0.01)
        if self.fails:
            raise OSError("no space left")
        self.updates_at_saves.append(len(self.updates))
        await super().save(step, workers, progress)


def train_colocated(world, on_wait, **options):
    """Train, and call ``on_wait`` once the save for a drained node waits for the samples."""

    async def call_later():
        while not world.asked:
            await asyncio.sleep(0.01)
        on_wait()

    async def session():
        config = fakes.config(steps=3, checkpoint={"every": 0})
        running = run(config, world.workers(), fakes.prompts(40), [], world, world, **options)
        await asyncio.wait_for(asyncio.gather(running, call_later()), HANG_S)

    asyncio.run(session())


def test_a_run_that_is_asked_to_end_while_a_save_waits_for_samples_gives_them_up():
    """Before, the signal after a spot notice took effect only once the whole batch was trained on."""
    world, stopped = Colocated(), []
    with pytest.raises(Preempted, match="stopped on request; step 2 saved"):
        train_colocated(world, lambda: stopped.append(True), stop_requested=lambda: bool(stopped))
    assert world.saves == [2] and len(world.updates) == 2 and world.saved[2].step == 2


def test_a_save_that_waits_for_samples_ends_before_the_update():
    world = Colocated()
    train_colocated(world, world.released.set)
    assert world.saves == world.updates_at_saves == [2, 3] and len(world.updates) == 3


def test_a_save_that_fails_while_samples_are_missing_ends_the_run_at_once():
    world = Colocated(fails=True)
    with pytest.raises(OSError, match="no space left"):
        train_colocated(world, lambda: None)
    assert len(world.updates) == 2


class Snapshot(OwnWorld):
    """The snapshot of step 2 is written until all samples of the fourth step exist; meanwhile a node is
    drained.
    """

    def __init__(self, directory):
        super().__init__(directory)
        self.leaving, self.saving = set(), asyncio.Event()
        self.engines.gate.clear()
        self._write, self.engines.written = self.engines.written, self.written

    def workers(self, reference=False):
        return replace(super().workers(reference), leaving_nodes=lambda: frozenset(self.leaving))

    def phase(self, name):
        super().phase(name)
        if name == "sample" and len(self.updates) == 3:
            self.leaving = {"a"}

    async def written(self):
        if self.leaving:
            self.saving.set()
            while len(self.sampled) < 16:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # for the loop to receive its batch
        await self._write()

    async def sample(self, prompt, **request):
        if not prompt.uid.startswith("held") and len(self.updates) == 3:
            await self.saving.wait()
        return await super().sample(prompt, **request)

    async def save(self, step, workers, progress):
        await super().save(step, workers, progress)
        self.engines.gate.set()


def test_a_batch_that_is_finished_while_a_save_waits_for_a_snapshot_is_in_the_checkpoint(tmp_path):
    """Before, the checkpoint lacked it, and the resumed run continued with the batch after it."""
    world, resumed = Snapshot(tmp_path), fakes.World(jitter=False)
    config = fakes.config(steps=5, checkpoint={"every": 0}, evaluation=EVERY_2 | {"before": False})
    config = config.model_copy(update={"dynamic_sampling": DynamicSamplingConfig(enabled=True)})
    prompts = fakes.prompts(40)
    training = run(config, world.workers(), prompts, HELD, world, world)
    asyncio.run(asyncio.wait_for(training, HANG_S))
    progress = world.saved[3]
    assert sorted(world.saved) == [3, 5] and 3 in progress.pipeline.order_indices
    asyncio.run(run(config, resumed.workers(), prompts, HELD, resumed, resumed, progress))
    assert resumed.ledger_entries == {step: world.ledger_entries[step] for step in (4, 5)}
