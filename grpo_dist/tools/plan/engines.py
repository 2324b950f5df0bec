"""A simulated rollout engine: continuous batching as a fluid model.

All running sequences grow by one token per engine step, whose duration depends on their number and cached
tokens. Between two events (a sequence starts or ends) only the contexts change, so a stretch of many steps is
one sum. Timers are set only for visible events: the end of a group, and the end of a sample if a request
waits for its slot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from grpo_dist.runtime.metering import Span

if TYPE_CHECKING:
    from grpo_dist.tools.plan.rates import Rates

_ALMOST = 1e-6  # tolerance, tokens


class Engine:
    """``capacity``: maximum running sequences; others wait. Uses the running loop's clock."""

    def __init__(self, times: Rates, capacity: int, *, spans: list[Span] | None = None) -> None:
        """``spans``: receives the busy times."""
        self._times, self._capacity = times, max(1, capacity)
        self.spans = [] if spans is None else spans
        # Whether a sample's end matters before its group is finished; otherwise a later event handles it.
        self.is_watched: Callable[[], bool] = lambda: True
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._running: list[_Running] = []  # in reverse order of their ends
        self._waiting: deque[tuple[float, float, _Group]] = deque()  # (tokens, prompt's share, group)
        self._stretches: deque[tuple[float, float]] = deque()  # seconds and steps until each planned end
        self._context = 0.0  # tokens in the cache
        self.steps = self.tokens = 0.0  # totals so far
        self._debt = 0.0  # seconds of prefill before the next step
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._dirty = self._paused = False
        self._busy_since: float | None = None  # start of the current busy span

    async def generate(
        self, prompt_tokens: float, lengths: Sequence[float], *, on_sample: Callable[[], None], **how: Any
    ) -> None:
        """Wait until all samples of a group are finished, see `begin`."""
        finished: asyncio.Future[None] = self._loop.create_future()
        self.begin(prompt_tokens, lengths, on_sample, lambda: finished.set_result(None), **how)
        await finished

    def begin(
        self,
        prompt_tokens: float,
        lengths: Sequence[float],
        on_sample: Callable[[], None],
        on_end: Callable[[], None],
        *,
        cached: float = 0.0,
        turns: int = 1,
        tool_s: float = 0.0,
    ) -> None:
        """Start a group. Calls ``on_sample`` at the end of each sample, and ``on_end`` after the last sample.
        The prompt is prefilled once; ``cached`` further tokens before it are in the cache.

        An episode is sampled in ``turns`` of equal length, and frees its slot for ``tool_s`` seconds between
        turns. Its history stays in the cache.
        """
        group = _Group(len(lengths), on_sample, on_end)
        if turns == 1:
            self._enqueue(prompt_tokens, lengths, cached, group)
            return
        share = (cached + prompt_tokens) / len(lengths)

        def begin_turn(length: float, number: int = 0) -> None:
            def on_turn() -> None:
                if number + 1 < turns:
                    self._loop.call_later(tool_s, begin_turn, length, number + 1)
                else:
                    group.sample_done()

            new, cached = (0.0, share + number * length / turns) if number else (share, 0.0)
            self._enqueue(new, [length / turns], cached, _Group(1, on_turn, lambda: None))

        for length in lengths:
            begin_turn(length)

    def _enqueue(self, prompt_tokens: float, lengths: Sequence[float], cached: float, group: _Group) -> None:
        self.advance()
        if self._busy_since is None:
            self._busy_since = self._loop.time()
        self._debt += self._times.prefill_s(prompt_tokens)
        share = (cached + prompt_tokens) / len(lengths)
        self._waiting.extend((length, share, group) for length in lengths)
        self.replan()

    def pause(self) -> None:
        """Stop decoding, as for new weights."""
        self.advance()
        self._paused = True
        self.replan()

    def resume(self) -> None:
        """Resume decoding after recomputing the dropped cache."""
        self.advance()
        self._paused = False
        if self._context:
            self._debt += self._times.prefill_s(self._context)
        self.replan()

    def advance(self) -> None:
        """Add the tokens decoded since the last event, and handle the samples that have ended."""
        now = self._loop.time()
        elapsed, self._since = now - self._since, now
        if elapsed <= 0.0 or self._paused or not self._running:
            return
        paid = min(elapsed, self._debt)
        self._debt -= paid
        elapsed -= paid
        while elapsed > 0.0 and self._stretches:
            seconds, steps = self._stretches[0]
            if elapsed < seconds:
                num_tokens = steps * elapsed / seconds
                self._stretches[0] = seconds - elapsed, steps - num_tokens
                self._decode(num_tokens)
                return
            self._end_stretch()
            elapsed -= seconds

    def replan(self) -> None:
        """Reschedule the next event once, after all events at the current time."""
        if not self._dirty:
            self._dirty = True
            self._loop.call_soon(self._plan)

    def _decode(self, steps: float) -> None:
        num_tokens = steps * len(self._running)
        self.steps += steps
        self.tokens += num_tokens
        self._context += num_tokens

    def _end_stretch(self) -> None:
        """Decode to the end of the first stretch, and handle the samples that end there."""
        self._decode(self._stretches.popleft()[1])
        running = self._running
        self.steps = max(self.steps, running[-1][0])  # rounding may leave a remainder
        end, ended = self.steps + _ALMOST, []
        while running and running[-1][0] <= end:
            ended.append(running.pop())
            self._context -= ended[-1][2] + ended[-1][3]
        self._note_ends(ended)

    def _note_ends(self, ended: Sequence[_Running]) -> None:
        if not self._running and not self._waiting:
            self._context = 0.0
            self._end_span()
        if not self._stretches:
            self.replan()
        for *_, group in ended:
            group.sample_done()

    def _plan(self) -> None:
        """Schedule the next relevant sample end, else the end of a group."""
        self._dirty = False
        if self._timer:
            self._timer.cancel()
            self._timer = None
        running, begun = self._running, len(self._running)
        while self._waiting and len(running) < self._capacity:
            length, share, group = self._waiting.popleft()
            group.last = max(group.last, self.steps + length)
            running.append((self.steps + length, next(self._numbers), length, share, group))
            self._context += share
        if len(running) > begun:
            running.sort(reverse=True)
        self._stretches.clear()
        if not running or self._paused:
            return
        each = bool(self._waiting) or self.is_watched()
        total, at, context, left = self._debt, self.steps, self._context, len(running)
        is_last, step_s = False, self._times.decode_step_s
        while left and not is_last:
            last = running[left - 1][0]
            steps = last - at
            grown = left * steps
            seconds = steps * step_s(left, context + grown / 2) if steps > 0.0 else 0.0
            self._stretches.append((seconds, steps))
            total += seconds
            context += grown
            at, is_last = last, each
            while left and running[left - 1][0] <= at + _ALMOST:
                left -= 1
                _, _, length, share, group = running[left]
                context -= share + length
                is_last = is_last or group.last <= at + _ALMOST
        self._timer = self._loop.call_later(total, self._reached)

    def _reached(self) -> None:
        """Finish the samples whose planned end is due."""
        self._timer = None
        self._debt, self._since = 0.0, self._loop.time()
        while self._stretches:
            self._end_stretch()

    def _end_span(self) -> None:
        if self._busy_since is not None:
            self.spans.append(Span("sample", self._busy_since, self._loop.time()))
            self._busy_since = None


class _Group:
    """``last``: the engine step at which the last running sample ends."""

    __slots__ = ("_left", "_on_end", "_on_sample", "last")

    def __init__(self, samples: int, on_sample: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._left, self._on_sample, self._on_end, self.last = samples, on_sample, on_end, 0.0

    def sample_done(self) -> None:
        self._left -= 1
        self._on_sample()
        if not self._left:
            self._on_end()


_Running = tuple[float, int, float, float, _Group]  # last step, number, tokens, share of the prompt, group
