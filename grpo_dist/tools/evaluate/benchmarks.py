"""Benchmarks by name: the location and the columns of their problems.

In the directory `GRPO_DATA` (or --data-dir) a benchmark is one JSONL file with `problem` and `answer`;
without such a directory it is read from the hub, as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.config import DataSourceConfig
from grpo_dist.errors import expanded


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: its ``file`` in the data directory, the keys of its `DataSourceConfig` on the hub, and the
    columns ``by`` which its results are broken down.
    """

    file: str
    hub: Mapping[str, Any]
    by: tuple[str, ...] = field(default=())


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        "gsm8k_test.jsonl",
        {
            "path": "openai/gsm8k",
            "subset": "main",
            "split": "test",
            "problem_column": "question",
            "answer_pattern": r"####\s*(.+)",
        },
    ),
    "math500": Benchmark(
        "math500.jsonl", {"path": "HuggingFaceH4/MATH-500", "split": "test"}, by=("level", "subject")
    ),
    "aime24": Benchmark("aime24.jsonl", {"path": "HuggingFaceH4/aime_2024", "split": "train"}),
    "aime25": Benchmark("aime25.jsonl", {"path": "math-ai/aime25", "split": "test"}),
    "amc23": Benchmark(
        "amc23.jsonl", {"path": "math-ai/amc23", "split": "test", "problem_column": "question"}
    ),
}


def data_source(name: str, data_dir: Path | None) -> dict[str, Any]:
    """Return the `DataSourceConfig` keys of ``name``: a benchmark, or split `test` of a path or hub id.

    Raises ValueError for a benchmark that ``data_dir`` lacks.
    """
    known = BENCHMARKS.get(name)
    if known is None:
        return {"path": name, "split": "test"}
    if data_dir is None:
        return {"name": name, **known.hub}
    path = expanded(data_dir) / known.file
    if not path.is_file():
        raise ValueError(
            f"{name}: no file {path}; expected {known.file} with `problem` and `answer` in the directory of "
            "--data-dir or GRPO_DATA; set neither to read it from the hub"
        )
    return {"name": name, "path": str(path)}


def breakdown(source: DataSourceConfig) -> tuple[str, ...]:
    """Return the columns by which results on ``source`` are broken down by default."""
    known = BENCHMARKS.get(source.name or "")
    return tuple(dict.fromkeys(["source", "difficulty", "level", *(known.by if known else ())]))
