"""Colocate engines, policy, reference and reward models on the same GPUs: which role holds the memory when.

    GPU      | engines       | reward model | reference | policy            | weights of both | engines
    driver   | sample ...... | score ...... | log-probs | update ...........| push            | sample ...
    leaving  | weights drop  | to host      | to host   | optimiser to host | weights to host |

One role at a time holds all GPUs. A role's handle enters `turn` for each call; calls to other roles wait
until the holder has no calls left. Then the holder leaves, and a waiting role takes over for all its pending
calls. So a batch is sampled, then scored, then given reference log-probs, whatever the order of calls.

- Engines drop their weights when they leave. The policy sends them again before they sample: after an update
  by the push of the step, after a checkpoint by a second push of the same version.
- Ranks offload their tensors (`grpo_dist.policy.rank_memory`), whatever the ZeRO stage. Before the push they
  offload all but the weights and free the update's memory, which the engines' weights need.
- Reference and reward models have one copy on each GPU. With adapters, the reference is the policy without
  them and needs no turn.
- Engines that join have dedicated GPUs: they never sleep, and get their first weights between two turns.

On CPUs, roles alternate on the same cores in the same way, but engines free no memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import RayError

from actors.lifecycle.calls import kill
from actors.lifecycle.team import FrozenPool, Team
from actors.workers.policy import PolicyGroup
from actors.workers.rollout import RolloutPool
from grpo_dist.errors import UserError
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.types import Prompt, TeacherLogprobs
from grpo_dist.workers import ReferenceSyncHandle, WeightSyncHandle, Workers

T = TypeVar("T")

ENGINES, POLICY, REFERENCE = "engines", "policy", "reference"
# Seconds that an idle holder keeps the GPUs: its next call may follow at once.
_GRACE_S = 0.02


class Colocation:
    """Moves the GPUs between roles. ``residents``: pools of frozen models, by name."""

    def __init__(
        self,
        policy: PolicyGroup,
        rollouts: RolloutPool,
        residents: Mapping[str, FrozenPool],
        *,
        timeout_s: float,
        where_stuck: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """``timeout_s``: deadline of one change of holder; ``where_stuck``: see `Workers`."""
        self.policy, self.rollouts, self._residents = policy, rollouts, residents
        self._timeout_s, self._where_stuck = timeout_s, where_stuck
        self.sync: WeightSyncHandle | None = None  # both syncs are set once all roles are connected
        self.reference_sync: ReferenceSyncHandle | None = None
        self._holder: str | None = None
        self._users = 0  # the holder's running calls
        self._idle, self._idle_since = asyncio.Event(), 0.0
        self._change: asyncio.Task[Any] | None = None  # current change of holder; kept after a failure
        self._has_initial_weights = True  # engines still have the weights that they were started with
        self._version, self._is_sent = 0, True  # policy version; whether it was sent to the engines
        self._seconds = defaultdict[str, float](float)  # seconds per kind of change since the last push
        policy.turn, policy.on_change = partial(self.turn, POLICY), self._policy_changes
        rollouts.turn = partial(self.turn, ENGINES)
        for name, resident in residents.items():
            resident.turn = partial(self.turn, name)

    async def start(self) -> None:
        """Load all roles in sequence, so that each finds free GPU memory when it measures or allocates."""
        await self.rollouts.ready()
        await self.rollouts.sleep(keep_weights=True)
        await self.policy.ready()
        await self.policy.hold("nothing")
        for resident in self._residents.values():
            await resident.ready()
            await resident.sleep()

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[None]:
        """Wait until ``role`` holds the GPUs, and keep them during the block. Raises UserError for engines
        after an update that was not pushed.
        """
        while self._holder != role or self._change is not None:
            if await self._is_free():
                if role == ENGINES and not self._has_initial_weights and not self._is_sent:
                    raise UserError(
                        "the engines have no weights: they share the policy's GPUs, and dropped them for the "
                        "update; call sync() after update(), before the engines sample or evaluate"
                    )
                self._begin(self._give(role))
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._idle_since = time.monotonic()
                self._idle.set()

    def _policy_changes(self) -> None:
        """Note that the policy's weights change: they must not be sent as the old version."""
        self._is_sent = False

    async def push(self, version: int) -> dict[str, float]:
        """Send the policy's weights to the engines, which hold the GPUs afterwards. Returns sync metrics and
        the seconds of all changes since the last push.
        """
        self._version, self._is_sent = version, True
        metrics = await self._alone(self._send)
        spent, self._seconds = self._seconds, defaultdict(float)
        return metrics | {f"time/turn_{change}_s": seconds for change, seconds in spent.items()}

    def admit(self, team: Team) -> None:
        """Let joining engines of ``team`` get the policy's weights between two turns."""
        assert team.catch_up is not None, "policy and engines are connected"
        team.catch_up = partial(self.catch_up, team.catch_up)

    async def catch_up(self, send: Callable[[Any], Awaitable[None]], worker: Any) -> None:
        """Send the policy's weights to ``worker``, which joins, by ``send``. Raises its error."""
        if (failure := await self._alone(lambda: self._catch_up(send, worker))) is not None:
            raise failure

    async def refresh(self) -> None:
        """Refresh the reference while both the policy's weights and the reference are on the GPUs."""
        await self._alone(self._refresh)

    async def _is_free(self) -> bool:
        """Return whether the holder can change now; otherwise wait until it may be possible.

        Raises the error of a failed change: the run then restarts all roles.
        """
        if (change := self._change) is not None:
            await asyncio.wait([change])  # bounded: by the deadlines of its parts
            if self._change is change:  # it failed; another may have started since
                change.result()  # bounded: it is done
        elif self._users:
            self._idle.clear()
            await self._idle.wait()  # bounded: calls of a role have deadlines
        elif (left := self._idle_since + _GRACE_S - time.monotonic()) > 0:
            await asyncio.sleep(left)
        else:
            return True
        return False

    async def _alone(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        while not await self._is_free():
            pass
        task = self._begin(change())
        await asyncio.wait([task])  # bounded: by the deadlines of its parts
        return task.result()  # bounded: it is done

    def _begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``change`` as a task, so that a cancelled caller does not leave the GPUs half moved."""
        task = asyncio.create_task(change, name="change of the GPUs' holder")
        task.add_done_callback(self._changed)
        self._change = task
        return task

    def _changed(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._change = None

    async def _give(self, role: str) -> None:
        if role == POLICY:
            await self._leave()
            await self._part("policy_reload", lambda: self.policy.hold("all"))
        elif role != ENGINES:
            await self._leave()
            await self._part(f"{_kind(role)}_wake", self._residents[role].wake_up)
        elif self._has_initial_weights:
            await self._leave()
            await self._part("engines_wake", self.rollouts.wake_up)
            self._has_initial_weights = False
        else:
            await self._send()
        self._holder = role

    async def _leave(self) -> None:
        """Move the current holder off the GPUs."""
        holder, self._holder = self._holder, None
        if holder == ENGINES:
            await self._part("engines_sleep", self._engines_sleep)
        elif holder == POLICY:
            await self._part("policy_offload", lambda: self.policy.hold("nothing"))
        elif holder is not None:
            await self._part(f"{_kind(holder)}_sleep", self._residents[holder].sleep)

    async def _engines_sleep(self) -> None:
        await self.rollouts.abandon()  # sleep would wait for requests of cancelled calls
        await self.rollouts.sleep(keep_weights=False)

    async def _only_weights(self) -> None:
        """Put only the policy's weights on the GPUs."""
        if self._holder == POLICY:
            self._holder = None
            await self._part("policy_offload", lambda: self.policy.hold("weights"))
        else:
            await self._leave()
            await self._part("policy_reload", lambda: self.policy.hold("weights"))

    async def _send(self) -> dict[str, float]:
        assert self.sync is not None and self._is_sent, "policy and engines are connected"
        await self._only_weights()
        await self._part("engines_wake", lambda: self.rollouts.wake_up("weights"))
        metrics = await self.sync.push(self._version)
        await self._part("policy_offload", lambda: self.policy.hold("nothing"))
        await self._part("engines_wake", lambda: self.rollouts.wake_up("kv_cache"))
        self._holder, self._has_initial_weights = ENGINES, False
        return metrics

    async def _catch_up(self, send: Callable[[Any], Awaitable[None]], worker: Any) -> Exception | None:
        """Return why ``worker`` could not join; the change itself succeeds, and the run continues."""
        await self._only_weights()
        failure, limit_s = None, self._timeout_s
        try:
            await send(worker)
        except (RayError, TimeoutError, UserError) as error:  # if a rank failed, the next part fails, too
            failure = error
            kill([worker])  # a rank that is sending to it notices
            limit_s += self._timeout_s  # a rank may wait this long for it to connect
        await self._part("policy_offload", lambda: self.policy.hold("nothing"), limit_s)
        return failure

    async def _refresh(self) -> None:
        assert self.reference_sync is not None, "policy and reference are connected"
        await self._only_weights()
        await self._part("reference_wake", self._residents[REFERENCE].wake_up)
        await self.reference_sync.refresh()
        await self._part("policy_offload", lambda: self.policy.hold("nothing"))
        self._holder = REFERENCE

    async def _part(
        self, name: str, move: Callable[[], Awaitable[None]], limit_s: float | None = None
    ) -> None:
        """Run and time one part of a change. ``limit_s``: its deadline; None: the default one."""
        stage = f"placement: {name.replace('_', ' ')} on the shared GPUs"
        begin = time.perf_counter()
        async with deadline(limit_s or self._timeout_s, stage, explain=self._where_stuck):
            await move()
        self._seconds[name] += time.perf_counter() - begin


def colocated(workers: Workers, colocation: Colocation, *, has_reference: bool) -> Workers:
    """Return the connected ``workers`` with the weight syncs of ``colocation``. ``has_reference``: the loss
    needs a reference; without reference workers, the policy serves as one.
    """
    colocation.sync, colocation.reference_sync = workers.sync, workers.reference_sync
    reference = workers.reference
    if has_reference and reference is None:
        reference = BaseReference(colocation.policy, colocation)
    sync = colocation if workers.reference_sync else None
    return replace(workers, sync=colocation, reference=reference, reference_sync=sync)


def _kind(role: str) -> str:
    """Return the role without the model's name: "reward_model" for "reward_model safety"."""
    return role.partition(" ")[0]


_Request = tuple[Prompt, Any, int, "asyncio.Future[list[TeacherLogprobs]]"]  # prompt, samples, top_k, answer


class BaseReference:
    """The reference of a policy with adapters: the policy without them.

    All groups of a batch wait for the policy's turn; calls with equal ``top_k`` are answered together.
    """

    def __init__(self, policy: PolicyGroup, colocation: Colocation) -> None:
        self._policy, self._turn = policy, partial(colocation.turn, POLICY)
        self._waiting: list[_Request] = []
        self._answering: asyncio.Task[None] | None = None

    async def logprobs(self, prompt: Prompt, rollouts: Any, top_k: int = 0) -> list[TeacherLogprobs]:
        """Return log-probs of the samples, with the ``top_k`` likeliest tokens at each position.
        ``rollouts``: the samples, or `StoredSamples`.
        """
        answer: asyncio.Future[list[TeacherLogprobs]] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, rollouts, top_k, answer))
        try:
            async with self._turn():
                requests = [request for request in self._waiting if not request[-1].done()]
                self._waiting = []
                if requests:  # a task: it answers other callers, too, even if this one is cancelled
                    task = asyncio.create_task(self._answer(requests), name="log-probs of the base")
                    self._answering = task
                return await answer  # bounded: the call of the ranks has a deadline
        finally:
            answer.cancel()  # a cancelled caller needs no answer

    async def _answer(self, requests: list[_Request]) -> None:
        for top_k in sorted({request[2] for request in requests}):
            await self._answer_top_k([request for request in requests if request[2] == top_k], top_k)

    async def _answer_top_k(self, requests: list[_Request], top_k: int) -> None:
        groups = [(prompt, samples) for prompt, samples, *_ in requests]
        try:
            logprobs = await self._policy.base_logprobs(groups, top_k)
        except Exception as error:
            for *_, answer in requests:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (*_, answer), values in zip(requests, logprobs, strict=True):
            if not answer.done():  # its caller may have been cancelled
                answer.set_result(values)

    async def save(self, path: Path) -> None:
        """Do nothing: the base never changes, and is in the model's directory."""

    async def load(self, path: Path) -> None:
        """Do nothing, see `save`."""
