"""Draws a result: a step's timeline, where the time goes, how near each stage is to its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.bench.table import FIGURES, show, written

_COLOURS = {
    "generation": "#3b7dd8", "training": "#e07b39", "sync": "#7a4fbf", "scoring": "#3fa66b",
    "reference": "#c9a227", "environments": "#b0568c", "overhead": "#9a9a9a",
}  # fmt: skip
_STAGES = {
    "sample": "generation", "update": "training", "sync": "sync", "score": "scoring", "logprobs": "reference",
    "act": "environments",
}  # fmt: skip
_NAMES = {"overhead": "driver and Ray"}
_SHOWN_ACTORS = 12  # more would be unreadable


def draw(result: BenchResult, path: Path) -> None:
    """Write a PNG to ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_timeline(figure.add_subplot(grid[0, :]), result)
    _draw_shares(figure.add_subplot(grid[1, 0]), result)
    _draw_limits(figure.add_subplot(grid[1, 1]), result)
    work, machine = result.workload, result.machine
    figure.suptitle(
        f"{result.name}: {show(result.figures, 'loop/tokens_per_s')}, "
        f"{written(result.figures['loop/step_s'], 's')} a step\n"
        f"{work['prompts_per_step']:.0f} prompts x {work['samples_per_prompt']:.0f} samples, "
        f"{work['completion_tokens_mean']:.0f} completion tokens on average; "
        f"{machine.get('gpu', machine['cpu'])}, {machine['cores']} cores",
        fontsize=11,
    )
    figure.savefig(path)


def _draw_timeline(axes: Any, result: BenchResult) -> None:
    actors = [actor.name for actor in result.actors][:_SHOWN_ACTORS]
    for bar in result.timeline:
        if bar.actor in actors and (stage := _STAGES.get(bar.stage)):  # others are parts of a change of turns
            axes.barh(actors.index(bar.actor), bar.end - bar.begin, left=bar.begin, color=_COLOURS[stage])
    axes.set_yticks(range(len(actors)), actors)
    axes.set_ylim(len(actors) - 0.5, -0.5)
    axes.set_xlim(0, result.timeline_s)
    axes.set_xlabel("seconds")
    idle = [f"{who} {show(result.figures, f'idle/{who}')}" for who in ("rollout", "trainer")]
    axes.set_title(f"one step; idle over all timed steps: {', '.join(idle)}", loc="left", fontsize=10)
    _bare(axes)


def _draw_shares(axes: Any, result: BenchResult) -> None:
    shares = {key.split("/")[1]: v for key, v in result.figures.items() if key.startswith("share/") and v > 0}
    names = list(shares)
    axes.barh(
        [_NAMES.get(n, n) for n in names],
        [100 * v for v in shares.values()],
        color=[_COLOURS[n] for n in names],
    )
    for i, value in enumerate(shares.values()):
        axes.text(100 * value + 1, i, f"{value:.1%}", va="center", fontsize=9)
    axes.set_xlim(0, 112)
    axes.invert_yaxis()
    axes.set_title("where a step's time goes, once each, %", loc="left", fontsize=10)
    _bare(axes)


def _draw_limits(axes: Any, result: BenchResult) -> None:
    keys = [key for key in FIGURES if key.startswith("of_limit/") and key in result.figures]
    axes.set_title("percent of limit", loc="left", fontsize=10)
    _bare(axes)
    if not keys:
        axes.set_axis_off()
        return
    names = [key.split("/")[1] for key in keys]
    values = [100 * result.figures[key] for key in keys]
    axes.barh(names, values, color=[_COLOURS.get(n, "#444444") for n in names])
    axes.axvline(100, color="black", linewidth=0.8, linestyle="--")
    for i, value in enumerate(values):
        axes.text(value + 1, i, f"{value:.1f} %", va="center", fontsize=9)
    axes.set_xlim(0, max(118, *(value * 1.12 for value in values)))
    axes.invert_yaxis()


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
