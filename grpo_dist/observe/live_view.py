"""Live view of a run: a block of lines that a terminal shows below the log.

demo  ━━━━━━━━━━━━━━──────────  31/50 steps  5:12 elapsed, 3:04 left
now     sample, 2.1 s           (during start-up: engines 12.3 s (rollout-0))
step    sample 1.2 s █████████████  update 0.7 s ███████▋  sync 0.1 s ▉
reward  ▁▂▂▃▄▅▆▇█ 0.531
actors  ● rollout     4/4  █████████▏  92% busy  1.3 GiB
        ● policy      2/2  ████        40% busy  0.9 GiB
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock

from rich.console import Group, RenderableType
from rich.text import Text

from grpo_dist.runtime.hardware import GIB
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.runtime.stage_log import clock_text, join_names, open_stages

_BARS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉"
_STEPS_AVERAGED = 10
_REWARDS_SHOWN = 48
_BAR_CELLS = 24
_BUSY_CELLS = 10
_COLOURS = {"sample": "cyan", "update": "green", "sync": "magenta", "evaluate": "blue", "save": "yellow"}


class LiveView:
    """State and rendering of the view. Thread-safe: rich renders it in a thread of its own."""

    def __init__(
        self,
        name: str,
        steps: int,
        start: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` gives seconds, from any origin."""
        self._name, self._steps, self._clock = name, steps, clock
        self._begin = self._since = clock()
        self._done, self._phase = start, "starting"
        self._ends: deque[float] = deque(maxlen=_STEPS_AVERAGED + 1)
        self._phases: deque[dict[str, float]] = deque(maxlen=_STEPS_AVERAGED)
        self._rewards: deque[float] = deque(maxlen=_REWARDS_SHOWN)
        self._unscored = 0.0  # samples of the last step
        self._used: dict[str, tuple[float, int]] = {}  # by role: mean busy share of the step, peak bytes
        self._replaced: dict[str, int] = {}
        self._states: Callable[[], Mapping[str, bool]] = dict
        self._lock = Lock()  # held while rendering, so that the state does not change

    def phase(self, name: str) -> None:
        """Record that the loop enters phase ``name``."""
        with self._lock:
            self._phase, self._since = name, self._clock()

    def follow(self, states: Callable[[], Mapping[str, bool]]) -> None:
        """Follow these actors. ``states`` returns for each name whether the actor is ready."""
        self._states = states

    def took(self, spans: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """Record the spans of the loop and the usage of each worker during the step that ends next."""
        phases: dict[str, float] = {}
        for span in spans:
            phases[span.stage] = phases.get(span.stage, 0.0) + span.end - span.begin
        seconds, used = sum(phases.values()) or math.inf, dict[str, tuple[float, int]]()
        for role in dict.fromkeys(map(_role, workers)):
            own_usage = [usage for name, usage in workers.items() if _role(name) == role]
            busy = sum(sum(usage.busy_s.values()) for usage in own_usage) / len(own_usage)
            used[role] = (min(1.0, busy / seconds), max(usage.peak_bytes for usage in own_usage))
        with self._lock:
            self._phases.append(phases)
            self._used |= used

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the end of ``step``."""
        with self._lock:
            self._done = step
            self._ends.append(self._clock())
            self._rewards.append(metrics.get("reward/mean", math.nan))
            self._unscored = metrics.get("reward/unscored", 0.0)
            for role in self._used:
                self._replaced[role] = self._replaced.get(role, 0) + int(metrics.get(f"restarts/{role}", 0))

    def left_s(self) -> float | None:
        """Estimate the seconds until the last step ends; None when there is too little data.

        The pace comes from the latest steps with the checkpoints and evaluations between them.
        """
        if len(self._ends) < 2:
            return None
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0.0, pace * (self._steps - self._done) - (self._clock() - self._ends[-1]))

    def __rich__(self) -> RenderableType:
        with self._lock:
            lines = self._lines()
        # In a Group: rich wraps a Text that is printed alone, despite no_wrap.
        return Group(*(Text("", no_wrap=True, overflow="ellipsis").append(line) for line in lines))

    def _lines(self) -> list[Text]:
        now = f"{self._phase}, {clock_text(self._clock() - self._since)}"
        lines = [self._head(), _labelled("now", "; ".join(open_stages()) or now)]
        if self._phases:
            lines.append(_labelled("step", self._stage_bars()))
        if self._rewards:
            lines.append(_labelled("reward", self._reward_line()))
        for i, actors in enumerate(self._actors()):
            lines.append(_labelled("" if i else "actors", actors))
        return lines

    def _head(self) -> Text:
        done, left = self._done / self._steps, self.left_s()
        line = Text(f"{self._name}  ", style="bold")
        line.append(f"{'━' * round(done * _BAR_CELLS):─<{_BAR_CELLS}}", style="green")
        line.append(f"  {self._done}/{self._steps} steps", style="default")
        line.append(f"  {clock_text(self._clock() - self._begin)} elapsed", style="default")
        return line.append(f", {clock_text(left)} left" if left is not None else "", style="default")

    def _stage_bars(self) -> Text:
        """Draw the mean seconds of each phase over the latest steps, with bars by share."""
        names = dict.fromkeys(name for seconds in self._phases for name in seconds)
        means = {n: sum(seconds.get(n, 0.0) for seconds in self._phases) / len(self._phases) for n in names}
        total = sum(means.values()) or 1.0
        line = Text()
        for name, seconds in means.items():
            if seconds >= 0.01 * total:
                line.append(f"{name} {seconds:.1f} s ")
                line.append(_bar(seconds / total, _BAR_CELLS) + "  ", style=_COLOURS.get(name, ""))
        return line

    def _reward_line(self) -> Text:
        latest = self._rewards[-1]
        line = Text(sparkline(self._rewards), style="green")
        line.append("" if math.isnan(latest) else f" {latest:.3f}", style="default")
        return line.append(f" {self._unscored:.0f} samples not scored" if self._unscored else "", style="red")

    def _actors(self) -> Iterator[Text]:
        """Draw a line for each role."""
        ready = dict(self._states())
        roles = list(dict.fromkeys(map(_role, ready)))
        width = max(map(len, roles), default=0)
        for role in roles:
            workers = {name: ok for name, ok in ready.items() if _role(name) == role}
            lost = [name for name, ok in workers.items() if not ok]
            parts = [f"{role:<{width}}  {len(workers) - len(lost):>4}/{len(workers)}"]
            if role in self._used:
                busy, most = self._used[role]
                parts.append(f"{_bar(busy, _BUSY_CELLS):<{_BUSY_CELLS}} {busy:4.0%} busy")
                parts.append(f"{most / GIB:.1f} GiB")
            if count := self._replaced.get(role):
                parts.append(f"{count} replaced")
            if lost:
                parts.append(f"being replaced: {join_names(lost)}")
            yield Text("● ", style="yellow" if lost else "green").append("  ".join(parts), style="default")


def _labelled(label: str, line: Text | str) -> Text:
    return Text(f"{label:<8}", style="dim").append(line, style="default" if isinstance(line, str) else None)


def sparkline(values: Iterable[float]) -> str:
    """Draw a character for each value, scaled to the range: [0, 1, 2] -> ▁▅█; NaN is a blank."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def _bar(share: float, cells: int) -> str:
    eighths = round(share * cells * 8)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def _role(name: str) -> str:
    """Return the role of an actor: rollout-12 -> rollout."""
    return name.rsplit("-", 1)[0]
