"""Run a training command as evidence, and record its result as a row of `results.jsonl`.

The run's directory stays in runs/evidence, so that `grpo-dist report` can rebuild its page.
``python -m tests.evidence.learning_runs DIRECTORY...`` records finished runs; without a directory it only
rewrites the table of README.md; with ``--check`` its exit code says whether the table is out of date.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.runtime.files import refresh

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs/evidence"
RESULTS = Path(__file__).with_name("results.jsonl")
README = Path(__file__).with_name("README.md")
HOURS = 3600  # s
_MEASURE = re.compile(r"eval/(?P<set>[^/]+)/(?P<measure>pass@1|tool_call_share)")
_IDENTITY = ("configuration", "overrides", "settings", "set", "measure")
# Recording a run changes these files, and makes no later run dirty.
_OWN_FILES = {str(path.relative_to(ROOT)) for path in (RESULTS, README)}
# These settings do not change the result.
_PLACES = ("name", "output_dir", "tracking")


def train(configuration: str, *overrides: str) -> tuple[list[dict[str, float]], Path]:
    """Train a configuration of this project and record its result. Return its metrics by step, and its
    directory. Raises CalledProcessError if the command fails.
    """
    output_dir = RUNS / _label(configuration, overrides)
    if output_dir.exists():
        shutil.rmtree(output_dir)
    command = [sys.executable, "-m", "grpo_dist.cli", "train", configuration, "checkpoint.resume=never"]
    command += [f"output_dir={output_dir}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, timeout=6 * HOURS)
    (run_dir,) = (path.parent for path in output_dir.glob("*/DONE"))
    rows = record(run_dir)
    print(table(rows))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], run_dir


def record(run_dir: Path, results: Path = RESULTS) -> list[dict[str, Any]]:
    """Replace the rows of this run's configuration, overrides and settings in ``results``; return the new
    rows. Rows of older versions of the configuration stay.
    """
    new = rows_of(run_dir)
    identities = {_identity(row) for row in new}
    old = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    rows = [row for row in old if _identity(row) not in identities] + new
    rows.sort(key=_identity)
    results.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return new


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return a row for each evaluation set of a finished run, from the run's files.

    Raises FileNotFoundError if the run has not finished, and ValueError if its command is not
    `grpo-dist train` or it lacks an evaluation before or after.
    """
    # The command creates the lock when it starts, before the cold start.
    seconds = (run_dir / "DONE").stat().st_mtime - (run_dir / ".lock").stat().st_mtime
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    environment = json.loads((run_dir / "environment.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    configuration, overrides = _command(environment["command"])
    common = {
        "configuration": configuration, "overrides": overrides, "settings": settings_digest(config),
        "model": config["sft"]["model"] if config["model"]["path"] == "sft" else config["model"]["path"],
        "seed": config["seed"], "steps": config["steps"], "minutes": round(seconds / 60, 1),
        "hardware": _hardware(environment), "commit": _commit(environment),
        "date": environment["started"].partition("T")[0],
    }  # fmt: skip
    first, last = lines[0], lines[-1]
    names = [match for name in first if (match := _MEASURE.fullmatch(name)) and name in last]
    if not names:
        raise ValueError(f"{run_dir}: no set was evaluated both before the first step and after the last")
    return [
        common
        | {"set": name["set"], "measure": name["measure"], "problems": _problems(config, name["set"])}
        | {"before": first[name[0]], "before_error": first[f"{name[0]}_stderr"]}
        | {"after": last[name[0]], "after_error": last[f"{name[0]}_stderr"]}
        for name in names
    ]


def settings_digest(config: dict[str, Any]) -> str:
    """Return eight hash digits of a resolved configuration, without the run's place and `checkpoint.resume`.
    Paths in this checkout are relative to its root.
    """
    sections = {section: value for section, value in config.items() if section not in _PLACES}
    sections["checkpoint"] = {key: value for key, value in sections["checkpoint"].items() if key != "resume"}
    text = json.dumps(sections, sort_keys=True).replace(f"{ROOT}/", "")
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _commit(environment: dict[str, Any]) -> str:
    """Return the commit of a run; `-dirty` if any file but the recorded results had changed."""
    commit: str = environment["git"]
    changed = environment.get("git_changed")  # None: recorded by code that did not name them
    if changed is not None and set(changed) <= _OWN_FILES:
        return commit.removesuffix("-dirty")
    return commit


def _command(command: list[str]) -> tuple[str, list[str]]:
    """Return a `grpo-dist train` command's configuration, and its overrides that can change the result."""
    if len(command) < 3 or command[1] != "train":
        raise ValueError(f"{' '.join(command)} is not a `grpo-dist train`")
    path = re.sub(r"^.*/(?=configs/)", "", command[2])
    places = ("checkpoint.resume=", "output_dir=", "name=")
    return path, [override for override in command[3:] if not override.startswith(places)]


def _hardware(environment: dict[str, Any]) -> str:
    gpus = environment["gpus"]
    processor = environment.get("processor", "a processor that was not recorded")
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{environment['cpus']} cores of {processor}"


def _problems(config: dict[str, Any], name: str) -> str:
    """Return the number of problems and samples behind a figure, as text."""
    sources = [s for s in config["data"]["eval"] if name in (s["name"], (s["path"] or "").split(":")[-1])]
    rows = sources[0]["max_rows"] if len(sources) == 1 else None
    return f"{rows or 'all'} x {config['evaluation']['samples_per_prompt']}"


def _label(configuration: str, overrides: tuple[str, ...]) -> str:
    return re.sub(r"[^\w.=-]+", "_", "-".join([Path(configuration).stem, *overrides]))


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    # Rows from before the settings digest have none: no later run replaces them.
    return tuple(str(row.get(name)) for name in _IDENTITY)


def table(rows: list[dict[str, Any]]) -> str:
    """Return markdown with a line for each command: its evaluation sets, each with its runs by seed."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in sorted(rows, key=lambda row: (_run(row), row["set"], row["measure"], row["seed"])):
        runs.setdefault(_run(row), {}).setdefault(_set(row), []).append(row)
    lines = ["| run | set, problems x samples; seed: before → after, % | minutes |", "|---|---|---|"]
    for run, sets in runs.items():
        cell = "<br>".join(f"{name}; {', '.join(map(_change, same))}" for name, same in sets.items())
        minutes = _span(row["minutes"] for same in sets.values() for row in same)
        lines.append(f"| {run} | {cell} | {minutes} |")
    return "\n".join(lines)


def _run(row: dict[str, Any]) -> str:
    overrides = [text for text in row["overrides"] if not text.startswith(("seed=", "steps="))]
    return f"`{' '.join([row['configuration'].removeprefix('configs/'), *overrides])}`, {row['steps']} steps"


def _set(row: dict[str, Any]) -> str:
    return f"{row['set']}, {row['problems']}" + (f", {row['measure']}" if row["measure"] != "pass@1" else "")


def _change(row: dict[str, Any]) -> str:
    before, after = (f"{100 * row[w]:.1f}±{100 * row[f'{w}_error']:.1f}" for w in ("before", "after"))
    return f"{row['seed']}: {before} → {after}"


def _span(numbers: Iterable[float]) -> str:
    low, high = min(values := list(numbers)), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


if __name__ == "__main__":
    for directory in (Path(name) for name in sys.argv[1:] if not name.startswith("--")):
        record(directory)
    recorded = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    sys.exit(refresh(README, "results", table(recorded), arguments=sys.argv[1:]))
