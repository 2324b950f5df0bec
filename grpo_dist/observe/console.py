"""Terminal output: a line per step, a live view below the lines, and a table at the end.

Without a terminal only the lines are printed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from grpo_dist.algorithms.intervals import wilson
from grpo_dist.runtime.hardware import GIB
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.runtime.stage_log import clock_text, join_names, open_stages, shown_by_view
from grpo_dist.runtime.tables import Terminal, make_table, print_lines

# label, metric, format
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "loss/total", "{:+.4f}"),
    ("kl", "ref/kl", "{:.4f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad", "policy/grad_norm", "{:.2f}"),
    ("len", "rollout/length_tokens", "{:.0f}"),
    ("cut", "rollout/truncated_share", "{:.0%}"),
    ("no signal", "group/no_signal_share", "{:.0%}"),
    ("mismatch", "mismatch/logprob_diff_max", "{:.1e}"),
)
_TIMES = (("sample", "time/sample_s"), ("update", "time/update_s"), ("sync", "time/sync_s"))
_PACE_S = 3600.0  # latest steps that the estimate of the time left uses
T = TypeVar("T")


class LiveView:
    """The block of lines below the log. Thread-safe: rich renders it in a separate thread.

    demo ━━━━━━━━━━━━━╸━━━━━━━━━━ 31/50 0:05:12 0:03:04      steps, time elapsed and left
    now     sample, 2.1 s           (during start-up: engines 12.3 s (rollout-0))
    actors  ● rollout     4/4   92% busy  1.3 GiB
            ● policy      2/2   40% busy  0.9 GiB
    """

    def __init__(self, name: str, steps: int, start: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False), BarColumn(),
            MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            speed_estimate_period=_PACE_S,
        )  # fmt: skip
        self._steps = self._progress.add_task(name, total=steps, completed=start)
        self._phase, self._since = "starting", time.monotonic()
        self._used: dict[str, tuple[float, int]] = {}  # by role: mean busy share of the step, peak bytes
        self._replaced: Counter[str] = Counter()
        self._states: Callable[[], Mapping[str, bool]] = dict
        self._lock = Lock()  # held while rendering, so that the state does not change

    def phase(self, name: str) -> None:
        """Record that the loop enters phase ``name``."""
        with self._lock:
            self._phase, self._since = name, time.monotonic()

    def follow(self, states: Callable[[], Mapping[str, bool]]) -> None:
        """Follow these actors. ``states`` returns for each name whether the actor is ready."""
        self._states = states

    def took(self, spans: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """Record the usage of each worker during the step that ends next. ``spans``: the loop's."""
        seconds = sum(span.end - span.begin for span in spans) or math.inf
        used = dict[str, tuple[float, int]]()
        for role, usages in _by_role(workers).items():
            busy = sum(sum(usage.busy_s.values()) for usage in usages.values()) / len(usages)
            used[role] = min(1.0, busy / seconds), max(usage.peak_bytes for usage in usages.values())
        with self._lock:
            self._used |= used

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the end of ``step``."""
        self._progress.update(self._steps, completed=step)
        with self._lock:
            for role in self._used:
                self._replaced[role] += int(metrics.get(f"restarts/{role}", 0))

    def __rich__(self) -> RenderableType:
        with self._lock:
            now = "; ".join(open_stages()) or f"{self._phase}, {clock_text(time.monotonic() - self._since)}"
            lines = [Text("now     ", style="dim").append(now, style="default"), *self._actors()]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(self._progress.get_renderable(), *lines)

    def _actors(self) -> Iterator[Text]:
        """Draw a line for each role."""
        roles = _by_role(self._states())
        width = max(map(len, roles), default=0)
        label = "actors"
        for role, workers in roles.items():
            lost = [name for name, ok in workers.items() if not ok]
            parts = [f"{role:<{width}}  {len(workers) - len(lost):>4}/{len(workers)}"]
            if role in self._used:
                busy, most = self._used[role]
                parts.append(f"{busy:4.0%} busy  {most / GIB:.1f} GiB")
            if count := self._replaced[role]:
                parts.append(f"{count} replaced")
            if lost:
                parts.append(f"being replaced: {join_names(lost)}")
            line = Text(f"{label:<8}", style="dim").append("● ", style="yellow" if lost else "green")
            yield line.append("  ".join(parts), style="default")
            label = ""


def _by_role(workers: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return ``workers`` by the role in their names: rollout-12 -> rollout."""
    roles: dict[str, dict[str, T]] = {}
    for name, value in workers.items():
        roles.setdefault(name.rsplit("-", 1)[0], {})[name] = value
    return roles


class Console:
    """Prints the metrics of a run."""

    def __init__(self, name: str, steps: int, start: int) -> None:
        self._console = Terminal(highlight=False, soft_wrap=True)
        self.view = LiveView(name, steps, start)
        self._live: Live | None = None
        # Ask the file: with FORCE_COLOR rich treats a CI log as a terminal, and views would fill it.
        if self._console.is_interactive and self._console.file.isatty():
            self._live = Live(
                get_renderable=lambda: self.view,
                console=self._console,
                transient=True,
                vertical_overflow="ellipsis",
            )
            self._live.start()
            shown_by_view(True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if "time/step_s" in metrics:
            self.view.step(step, metrics)
            self._console.print(step_line(step, metrics))
        if (loss := metrics.get("validation/loss")) is not None:
            self._console.print(f"validation after step {step}  loss {loss:.4f} nats a token", style="bold")
        if any(key.startswith("eval/") for key in metrics):
            for line in eval_lines(step, metrics):
                self._console.print(line, style="bold", markup=False)

    def warn(self, message: str) -> None:
        self._console.print(message, style="bold yellow", markup=False)

    def close(self, *, failed: bool) -> None:
        if self._live is not None:
            shown_by_view(False)
            self._live.stop()


def step_line(step: int, metrics: dict[str, float]) -> str:
    """Return the line of a step:

    ``step 12  reward 0.531  loss -0.0021 ...  2.1 s (sample 1.2, update 0.7, sync 0.0)  1,234 tok/s``
    """
    parts = [f"step {step:4d}"]
    parts += [f"{label} {form.format(metrics[key])}" for label, key, form in _COLUMNS if key in metrics]
    if unscored := metrics.get("reward/unscored"):
        parts.append(f"not scored {unscored:.0f}")
    if extra := metrics.get("group/extra_prompts"):
        parts.append(f"extra prompts {extra:.0f}")
    phases = ", ".join(f"{label} {metrics[key]:.1f}" for label, key in _TIMES if key in metrics)
    parts.append(f"{metrics['time/step_s']:.1f} s ({phases})")
    parts.append(f"{metrics['throughput/completion_tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


def eval_lines(step: int, metrics: dict[str, float]) -> list[str]:
    lines = []
    for name in eval_sets(metrics):
        scores = {k.rsplit("/", 1)[1]: v for k, v in metrics.items() if k.startswith(f"eval/{name}/")}
        columns = [f"{k} {format_with_error(scores, k, '.3f')}" for k in scores if f"{k}_stderr" in scores]
        lines.append(f"eval after step {step}  {name}: " + "  ".join(columns))
    return lines


def eval_sets(metrics: dict[str, float]) -> list[str]:
    return list(dict.fromkeys(k.split("/")[1] for k in metrics if k.startswith("eval/")))


def format_with_error(metrics: Mapping[str, float | None], key: str, form: str) -> str:
    """Return the estimate ``key`` with its standard error, "–" for either where it is missing or NaN (null in
    `metrics.jsonl`): 0.500 ± 0.100, 1.000 ± –, –. Where all problems are right, or all wrong, the error is 0
    and means nothing: then return the 95 % interval of Wilson (1927), 0.000 (0.000 to 0.278).
    """
    names = (key, f"{key}_stderr", "/".join([*key.split("/")[:-1], "problems"]))
    value, error, problems = (_number(metrics.get(name)) for name in names)
    if math.isnan(value):
        return "–"
    if error == 0 and value in (0, 1) and problems > 0:
        low, high = wilson(value, problems)
        return f"{value:{form}} ({low:{form}} to {high:{form}})"
    return f"{value:{form}} ± " + ("–" if math.isnan(error) else f"{error:{form}}")


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def print_before_after(
    before: Mapping[str, float | None], after: Mapping[str, float | None], run_dir: str
) -> None:
    """Print every estimate before training and of the exported weights, with standard errors. Prints nothing
    if stdout is closed: the run is done, and its directory has the numbers.
    """
    rows = []
    for key in after:
        if f"{key}_stderr" not in after:
            continue
        _, name, measure = key.split("/")
        change = _number(after.get(key)) - _number(before.get(key))
        rows.append((
            escape(name), measure,
            format_with_error(before, key, ".1%"), format_with_error(after, key, ".1%"),
            "–" if math.isnan(change) else f"{change:+.1%}",
        ))  # fmt: skip
    columns = ("set", "measure", "before", "after", "change")
    with suppress(OSError):
        console = Terminal(highlight=False)
        console.print(make_table("accuracy on held-out problems", columns, rows, left=("set", "measure")))
        print_lines(console, [f"run directory: {run_dir}"])
