"""Draws a simulated run: as lines of text, or a trace for chrome://tracing and https://ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.errors import UserError
from grpo_dist.observe.profiling import write_trace
from grpo_dist.runtime.metering import Span
from grpo_dist.tools.bench.figures import covered_s
from grpo_dist.tools.plan.simulation import Simulated

_MARKS = {
    "sample": "s",
    "update": "U",
    "sync": "=",
    "turn": "<",
    "score": "g",
    "reward_model": "m",
    "logprobs": "r",
    "restart": "x",
}
_SHOWN = {"rollout": 6, "policy": 1, "reference": 2, "reward": 2}  # workers of each role
_REWARD_MODEL = "reward-model-"  # followed by its name; each is a role, with as many workers shown as graders
LEGEND = (
    "s sample  U update  = weight sync  < change of turns  g grade  m reward model  r reference  x restart"
)


def as_text(run: Simulated, *, width: int = 96) -> list[str]:
    """Draw the timed steps: a line for each of the first workers of a role, a letter for the stage that fills
    most of each interval, and the ends of the steps below.
    """
    begin, end = _window(run)
    cell, tracks, lines = (end - begin) / width, _tracks(run), []
    wide = max(12, *map(len, tracks))
    for track in tracks:
        marks = "".join(_mark(run.bars[track], begin + i * cell, cell) for i in range(width))
        lines.append(f"{track:>{wide}} |{marks}|")
    ends = {min(width - 1, int((e - begin) / cell)) for e in run.ends[run.timed]}
    lines.append(f"{'step ends':>{wide}} |{''.join('^' if i in ends else ' ' for i in range(width))}|")
    lines.append(f"{'':>{wide}}  {begin:<.1f} s{f'{end:.1f} s':>{max(1, width - len(f'{begin:.1f} s'))}}")
    return lines


def write(run: Simulated, path: Path) -> None:
    """Write a trace to a file. Raises UserError where that fails."""
    try:
        ends = {f"end of step {step}": end for step, end in enumerate(run.ends, start=1)}
        write_trace(path, run.bars, ends)
    except OSError as error:
        raise UserError(
            f"--timeline {path}: cannot be written ({error.strerror}); name another file"
        ) from error


def _window(run: Simulated) -> tuple[float, float]:
    first, last = run.timed.start, run.timed.stop
    return run.ends[first - 1] if first else 0.0, run.ends[last - 1]


def _tracks(run: Simulated) -> list[str]:
    shown: list[str] = []
    models = {name.rpartition("-")[0] for name in run.bars if name.startswith(_REWARD_MODEL)}
    for role, count in [*_SHOWN.items(), *((model, _SHOWN["reward"]) for model in sorted(models))]:
        own = [name for name in run.bars if name == role or name.rpartition("-")[0] == role]
        shown += sorted(own, key=lambda name: (len(name), name))[:count]
    return shown


def _mark(spans: list[Span], begin: float, seconds: float) -> str:
    share = {
        stage: covered_s((s for s in spans if s.stage == stage), begin, begin + seconds) for stage in _MARKS
    }
    stage = max(share, key=share.__getitem__)
    return _MARKS[stage] if share[stage] > 0.25 * seconds else "."
