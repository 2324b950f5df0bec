"""A simulated rollout engine: continuous batching as a fluid.

All running sequences grow by one token a step of the engine; how long a step lasts depends on how many they
are and on what they hold in the cache. Between two events (a sequence begins, a sequence ends) nothing
changes but the contexts, so a stretch of many steps is one timer, whatever its length.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from grpo_dist.runtime.metering import Span

_ALMOST = 1e-6  # tokens


class EngineTimes(Protocol):
    def decode_step_s(self, sequences: float, context: float) -> float:
        """Return the seconds of one step with ``sequences`` that hold ``context`` tokens together."""
        ...

    def prefill_s(self, tokens: float) -> float: ...


class Engine:
    """``capacity``: sequences that run at once; the others wait. The clock is the running loop's."""

    def __init__(self, times: EngineTimes, capacity: int, *, spans: list[Span] | None = None) -> None:
        """``spans``: receives the times when it has requests."""
        self._times, self._capacity = times, max(1, capacity)
        self.spans = [] if spans is None else spans
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        # (last step, number, tokens, share of the prompt, group) of each running sequence
        self._running: list[tuple[float, int, float, float, _Group]] = []
        self._waiting: deque[tuple[float, float, _Group]] = deque()  # (tokens, prompt's share, group)
        self._context = 0.0  # tokens in the cache
        self.steps = self.tokens = 0.0  # made so far
        self._debt = 0.0  # seconds of prefill before the next step
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._dirty = self._paused = False
        self._busy_since: float | None = None  # since when it has had requests

    async def generate(
        self,
        prompt_tokens: float,
        lengths: Sequence[float],
        *,
        on_sample: Callable[[], None],
        cached: float = 0.0,
    ) -> None:
        """Return when all samples of a group are finished. Calls ``on_sample`` at the end of each. The prompt
        is prefilled once; ``cached`` further tokens before it are in the cache.
        """
        self._advance()
        if self._busy_since is None:
            self._busy_since = self._loop.time()
        group = _Group(len(lengths), on_sample, self._loop.create_future())
        self._debt += self._times.prefill_s(prompt_tokens)
        share = (cached + prompt_tokens) / len(lengths)
        self._waiting.extend((length, share, group) for length in lengths)
        self._change()
        await group.finished

    def pause(self) -> None:
        """Stop decoding, as for new weights."""
        self._advance()
        self._paused = True
        self._change()

    def resume(self) -> None:
        """Resume decoding after computing the dropped cache again."""
        self._advance()
        self._paused = False
        if self._context:
            self._debt += self._times.prefill_s(self._context)
        self._change()

    def _advance(self) -> None:
        """Add the tokens decoded since the last event."""
        now = self._loop.time()
        elapsed, self._since = now - self._since, now
        if self._paused or not (self._running or self._waiting):
            return
        paid = min(elapsed, self._debt)
        self._debt -= paid
        if elapsed > paid and self._running:
            planned = self._running[0][0] - self.steps
            made = min(planned, (elapsed - paid) / self._step_s(planned))
            self.steps += made
            self.tokens += made * len(self._running)
            self._context += made * len(self._running)

    def _step_s(self, steps: float) -> float:
        """Return the mean time of the next ``steps`` decode steps."""
        n = len(self._running)
        return self._times.decode_step_s(n, self._context + n * steps / 2)

    def _change(self) -> None:
        """Plan the next event again, once, after all events of this moment."""
        if not self._dirty:
            self._dirty = True
            self._loop.call_soon(self._plan)

    def _plan(self) -> None:
        self._dirty = False
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._running) < self._capacity:
            length, share, group = self._waiting.popleft()
            place = (self.steps + length, next(self._numbers), length, share, group)
            heapq.heappush(self._running, place)
            self._context += share
        if self._running and not self._paused:
            steps = self._running[0][0] - self.steps
            seconds = self._debt + steps * self._step_s(steps)
            self._timer = self._loop.call_later(max(seconds, 0.0), self._reached)

    def _reached(self) -> None:
        """Finish the sequences that end now."""
        ended = []
        self._timer = None
        self._advance()
        self.steps = max(self.steps, self._running[0][0])  # rounding may leave a remainder
        while self._running and self._running[0][0] <= self.steps + _ALMOST:
            _, _, length, share, group = heapq.heappop(self._running)
            self._context -= share + length
            ended.append(group)
        if not self._running and not self._waiting:
            self._context = 0.0
            self._end_span()
        self._change()
        for group in ended:
            group.sample_done()

    def _end_span(self) -> None:
        if self._busy_since is not None:
            self.spans.append(Span("sample", self._busy_since, self._loop.time()))
            self._busy_since = None


class _Group:
    __slots__ = ("_left", "_on_sample", "finished")

    def __init__(self, samples: int, on_sample: Callable[[], None], finished: asyncio.Future[None]) -> None:
        self._left, self._on_sample, self.finished = samples, on_sample, finished

    def sample_done(self) -> None:
        self._left -= 1
        self._on_sample()
        if not self._left:
            self.finished.set_result(None)


async def generate_episode(
    engine: Engine,
    prompt_tokens: float,
    length: int,
    *,
    turns: int,
    tool_s: float,
    on_sample: Callable[[], None],
) -> None:
    """Sample an episode of ``length`` in ``turns`` of equal length, which gives way to others for the
    ``tool_s`` seconds between two of them. Its history is found in the cache. ``prompt_tokens``: its share of
    the group's prompt.
    """
    for turn in range(turns):
        if turn:
            await asyncio.sleep(tool_s)
        cached = prompt_tokens + turn * length / turns if turn else 0.0
        last = on_sample if turn + 1 == turns else _nothing
        new = 0.0 if turn else prompt_tokens
        await engine.generate(new, [length / turns], on_sample=last, cached=cached)


def _nothing() -> None:
    """Ignore the end of a turn that another one follows."""
