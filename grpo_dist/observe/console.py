"""Terminal output: a line per step, a live view below the lines, and a table at the end.

Without a terminal only the lines are printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

from rich.live import Live
from rich.markup import escape

from grpo_dist.observe.live_view import LiveView
from grpo_dist.runtime.stage_log import shown_by_view
from grpo_dist.runtime.tables import Terminal, make_table, print_lines
from grpo_dist.types.intervals import wilson

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


class Console:
    """Prints the metrics of a run."""

    def __init__(self, name: str, steps: int, start: int) -> None:
        self._console = Terminal(highlight=False, soft_wrap=True)
        self.view = LiveView(name, steps, start)
        self._live: Live | None = None
        # Ask the file: with FORCE_COLOR rich takes a CI log for a terminal, and views would fill it.
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
    """Return the estimate ``key`` with its standard error, "–" for either where it is missing or NaN, which
    `metrics.jsonl` has as null: 0.500 ± 0.100, 1.000 ± –, –. Where all problems are right, or all wrong, the
    error is 0 and says nothing: then it is the 95 % interval of Wilson (1927), 0.000 (0.000 to 0.278).
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
    where nobody reads stdout any longer: the run is done, and its directory has the numbers.
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
