"""Several benchmarks one after the other, and one table of all of them.

    name: cpu
    runs:
      - {name: equal_lengths, config: ../cpu_13m.yaml}
      - {name: tail, config: ../cpu_13m_tail.yaml}
      - {name: tail_by_length, config: ../cpu_13m_tail.yaml, overrides: {data.order: length}, against: tail}

Each is `grpo-dist bench` in a process of its own. One that fails does not keep the others from running.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table

from grpo_dist.config import Section
from grpo_dist.config.base import DirectoryName
from grpo_dist.config.files import ConfigError, load_config, read_tree, validated, with_overrides
from grpo_dist.config.text import escaped
from grpo_dist.errors import RunEnded, expanded, refusals
from grpo_dist.runs.directories import check_writable, make_free_directory
from grpo_dist.runtime.guardian import SET_PARENT_DEATH_SIGNAL, process_option
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.runtime.tables import make_table, wide_console
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.bench.table import notes, show

Start = Callable[[Sequence[str]], int]  # `grpo-dist` with these arguments; returns the exit code


class BenchRun(Section):
    """One benchmark as written."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="letters, digits, _ and -")
    config: str = Field(description="configuration file, relative to this one")
    overrides: dict[str, Any] = Field({}, description="dotted keys, e.g. {max_staleness: 1}")
    against: str | None = Field(None, description="an earlier run; its step over this one's is printed")

    def arguments(self, parent: Path) -> tuple[str, list[str]]:
        """Return the configuration's path and the overrides as on the command line."""
        texts = [f"{key}={json.dumps(escaped(value))}" for key, value in self.overrides.items()]
        return str(parent / self.config), texts


class BenchSet(Section):
    """A file of several benchmarks."""

    name: DirectoryName = Field("bench", description="name of the directory in `output_dir`")
    output_dir: str = Field("runs/bench", description="parent of the directory")
    runs: tuple[BenchRun, ...] = Field(min_length=1, description="the benchmarks, in order")

    @model_validator(mode="after")
    def _names(self) -> BenchSet:
        earlier: list[str] = []
        for run in self.runs:
            if run.name in earlier:
                raise ValueError(f"two runs are called `{run.name}`; give each its own name")
            if run.against is not None and run.against not in earlier:
                known = ", ".join(earlier) or "none"
                raise ValueError(
                    f"run `{run.name}`: against {run.against!r}: expected an earlier run: {known}"
                )
            earlier.append(run.name)
        return self


def bench_set(path: Path, overrides: Sequence[str] = (), start: Start | None = None) -> Path:
    """Run every benchmark of the file at ``path`` with ``overrides`` behind its own, print the table, and
    return the directory of the results. `name` and `output_dir` among ``overrides`` are those of the file.

    Raises ConfigError before anything starts where a configuration is invalid, and RunEnded at the end where
    a benchmark failed.
    """
    places, others = _split(overrides)
    found = load_set(path, others, places)
    with refusals():
        base = expanded(found.output_dir) / found.name
        check_writable(base.parent)
        directory = make_free_directory(base)  # before its first run: another set may start meanwhile
    results: dict[str, BenchResult] = {}
    failed: list[str] = []
    for number, run in enumerate(found.runs, 1):
        print_line(f"benchmark {number} of {len(found.runs)}: {run.name}")
        config, own = run.arguments(path.parent)
        place = [f"name={run.name}", f"output_dir={directory}"]
        code = (start or _start)(["bench", config, *own, *others, *place])
        if code:
            failed.append(f"{run.name} (exit code {code})")
        else:
            results[run.name] = BenchResult.read(directory / run.name / "bench.json")
    if results:
        print_set(found.runs, results, wide_console())
    print_line(f"written: {directory}")
    if failed:
        raise RunEnded(f"{len(failed)} of {len(found.runs)} benchmarks failed: {', '.join(failed)}")
    return directory


def load_set(path: Path, overrides: Sequence[str] = (), places: Sequence[str] = ()) -> BenchSet:
    """Read a file of several benchmarks and every configuration it names. ``overrides``: of all of these;
    ``places``: of the file itself. Raises ConfigError.
    """
    found = validated(with_overrides(read_tree(path), places, path), path, BenchSet)
    for run in found.runs:
        config, own = run.arguments(path.parent)
        try:
            load_config(config, [*own, *overrides])
        except ConfigError as error:
            raise ConfigError(f"{path}: run `{run.name}`: {error}") from error
    return found


def _split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides that say where the results of all runs go, and the others."""
    places = [text for text in overrides if text.startswith(("name=", "output_dir="))]
    return places, [text for text in overrides if text not in places]


def _start(arguments: Sequence[str]) -> int:
    def end_with_parent() -> None:
        process_option(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)

    command = [sys.executable, "-m", "grpo_dist.cli", *arguments]
    ended = subprocess.run(command, preexec_fn=end_with_parent)  # bounded: by the benchmark's deadlines
    return ended.returncode


def print_set(runs: Sequence[BenchRun], results: Mapping[str, BenchResult], console: Console) -> None:
    """Print a line for each of ``results``, and below what only some runs have."""
    console.print(set_table(runs, results))
    for name, result in results.items():
        for note in notes(result.figures):
            console.print(f"{name}: {note}", soft_wrap=True)


def set_table(runs: Sequence[BenchRun], results: Mapping[str, BenchResult]) -> Table:
    """Return a row for each run with a result: its step, what each stage reached of its limit, and how many
    times as fast its step and its sampling are as those of the run that it is held against.
    """
    shares = ("generation, of limit", "training, of limit", "sync, of limit")
    columns = ("run", "step", "over its limit", *shares, "against", "step", "sampling")
    rows = []
    for run in runs:
        if run.name not in results:
            continue
        found = results[run.name].figures
        stages = [show(found, f"of_limit/{stage}") for stage in ("generation", "training", "sync")]
        other = results[run.against].figures if run.against and run.against in results else {}
        times = [_times(other, found, key) for key in ("loop/step_s", "generation/step_s")]
        steps = [show(found, "loop/step_s"), show(found, "loop/step_over_limit")]
        rows.append((run.name, *steps, *stages, run.against or "", *times))
    return make_table("benchmarks", columns, rows, left=("run", "against"), bold=True)


def _times(other: Mapping[str, float], own: Mapping[str, float], key: str) -> str:
    """Return how many times as fast as the ``other`` this run is, as text; nothing without another."""
    return f"{other[key] / own[key]:.2f} x" if key in other and own.get(key) else ""
