"""Driver-side handle of all engines: spreads prompts over them.

driver        pool: waits for capacity, picks the engine with the fewest outstanding tokens
  |  sample()   |
  +-----------> | --- with others ---> RolloutWorker: G requests, own seed each -> tuple[Rollout, ...]
  | <--- where the group's samples are, as soon as it is finished (`exchange`)

Groups of a lost engine are sampled again by another engine or by its replacement. The seeds are the same, so
the samples are the same under the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.lifecycle.calls import LOST, end, results
from actors.lifecycle.team import ActorSpec, ElasticTeam, Team
from actors.workers.engine_settings import EngineSpec
from actors.workers.environment import EnvironmentAddresses, EnvironmentPool
from actors.workers.exchange import Line, StoredGroups, StoredSamples
from actors.workers.rollout import RolloutWorker, outstanding
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.load_balancer import QUEUE_DEPTH, Load
from grpo_dist.types import Prompt, Sampling


class RolloutPool:
    """Sends each group whole to the engine with the fewest outstanding tokens, or waits while all are full.

    A group is not split over engines: each would prefill the prompt again, and with many samples the engines
    finish together anyway. Outstanding load is what was sent less what the
    engine reports as finished, sample by sample: the last long sample of a group occupies one slot, not the
    slots of its whole group.
    """

    def __init__(
        self,
        spec: EngineSpec,
        actors: ActorSpec,
        *,
        environments: EnvironmentPool | None = None,
        worker: type = RolloutWorker,
        role: str = "rollout",
    ) -> None:
        """``environments``: None where no prompt has one."""
        actors = replace(actors, options={"max_concurrency": 10_000} | actors.options)
        self.role, self.tensor_parallel_size = role, spec.rollout.tensor_parallel_size
        self.team = self._made_team(role, spec, actors, ray.remote(worker))
        self.team.on_lost = self._forget
        self._environments = environments
        if environments is not None:
            environments.engines.append(self.team)
        self.workers, self._load_balancer = self.team.workers, self.team.load_balancer
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # see `Colocation`
        count, self._reserved = len(self.workers), spec.rollout.num_workers
        self._lines: dict[Any, Line] = {}  # by engine
        # Finished sequences between two reports of an engine none of whose groups is done.
        self._report_every = max(1, spec.max_num_seqs // 8)
        self._finished = [Load(0, 0)] * count
        # Where speculation drafts from earlier samples: the engine that last sampled each prompt, by uid.
        self._samples_of: dict[str, int] | None = {} if spec.rollout.speculation else None

    def _made_team(self, role: str, spec: EngineSpec, actors: ActorSpec, worker: Any) -> Team:
        makers = actors.makers(worker, spec.rollout.num_workers, spec)
        options: dict[str, Any] = {
            "start": lambda worker: worker.start.remote(*self._start_arguments()),
            "health": lambda worker: worker.health.remote(),  # on its event loop, in parallel to its work
            "capacity": QUEUE_DEPTH * spec.max_num_seqs,
        }
        if actors.guests is None:
            return Team(role, makers, actors, **options)
        joining = replace(spec, colocated=False)
        return ElasticTeam(role, makers, actors, guest=actors.guest_maker(worker, joining), **options)

    async def ready(self) -> None:
        await self.team.ready()

    def _start_arguments(self) -> tuple[EnvironmentAddresses, ...]:
        return (self._environments.addresses(),) if self._environments is not None else ()

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> StoredSamples:
        """Sample ``prompt``; return where its finished samples are, which are not fetched."""
        async with self.turn():
            load = outstanding(prompt, len(seeds), sampling)
            while True:
                preferred = self._samples_of.get(prompt.uid) if self._samples_of else None
                index = await self._load_balancer.admit(load.sequences, load.tokens, prefer=preferred)
                worker = self.workers[index]
                if worker is None:  # a guest that was removed after it was chosen, and its load with it
                    continue
                if self._samples_of is not None:
                    self._samples_of[prompt.uid] = index
                try:
                    samples: StoredSamples = await self._line(index, worker).ask((prompt, seeds, sampling))
                    return samples
                except LOST as error:
                    self.team.lost(index, worker, error)
                except RayTaskError:  # a refused request, too few samples, or the engine has failed
                    if self._environments is not None:  # or no environment worker is left
                        self._environments.team.check()
                    if not await self.team.find_dead([worker]):
                        raise

    async def abandon(self) -> None:
        """Abort all pending requests on all engines."""
        await gather(self._abandoned(worker) for worker in self.team.alive())

    async def _abandoned(self, worker: Any) -> None:
        try:
            await worker.abandon.remote()
        except RayError:
            if not await self.team.find_dead([worker]):
                raise

    async def sleep(self, *, keep_weights: bool) -> None:
        """Have the reserved engines free their GPUs; those that joined have GPUs of their own."""
        await results(worker.sleep.remote(keep_weights) for worker in self.workers[: self._reserved])

    async def wake_up(self, *tags: str) -> None:
        await results(worker.wake_up.remote(list(tags) or None) for worker in self.workers[: self._reserved])

    async def shutdown(self) -> None:
        for line in self._lines.values():
            line.close()
        await self.team.shutdown()
        await end(self._present())

    def _present(self) -> list[Any]:
        return list(self.team.named().values())

    def _line(self, index: int, worker: Any) -> Line:
        """Return the line to an engine, made once for each, since every group needs it."""
        if (line := self._lines.get(worker)) is None:
            line = Line(worker.submit.remote, partial(self._collect, index, worker))
            self._lines[worker] = line
        return line

    async def _collect(self, index: int, worker: Any) -> list[tuple[int, Any]]:
        """Wait for groups of an engine, and release capacity as samples finish, also before a group does."""
        report, stored = worker.collect.remote(self._finished[index].sequences + self._report_every)
        finished, numbers, failed = await report
        self._note(index, worker, finished)
        groups = StoredGroups(stored)
        return [*((number, StoredSamples(groups, i)) for i, number in enumerate(numbers)), *failed]

    def _forget(self, index: int) -> None:
        """Reset the counters of a lost engine; its replacement starts at 0, and remembers no samples. Its
        episodes end.
        """
        if self._samples_of is not None:
            self._samples_of = {uid: other for uid, other in self._samples_of.items() if other != index}
        if self._environments is not None:
            self._environments.end_all(self.workers[index])
        self._finished[index] = Load(0, 0)

    def _note(self, index: int, worker: Any, finished: Load) -> None:
        if not self.team.is_current(index, worker):
            return
        before = self._finished[index]
        if finished > before:  # replies may arrive out of order
            self._finished[index] = finished
            news = finished.minus(before)
            self._load_balancer.release(index, news.sequences, news.tokens)
