"""Writes what a plan expects of each shipped recipe into the head of its file.

    python -m grpo_dist.tools.plan.heads             writes the heads of all recipes
    python -m grpo_dist.tools.plan.heads --check     exits with 1 where a head is out of date

A head has a line for the file as it is, and one for each of 1, 8, 16, 64 and 128 H100, at the file's own
batch and staleness: of all splits and placements the one with the highest bound on its throughput, simulated.
Recipes for CPUs are planned with the benchmark of this project.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_dist.config import Config
from grpo_dist.config.files import changed, load_config
from grpo_dist.errors import UserError
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.accelerators import ClusterShape, parse_cluster
from grpo_dist.tools.plan.assumptions import Assumptions
from grpo_dist.tools.plan.command import made_setting
from grpo_dist.tools.plan.options import Option, Planned, Setting, option_of, planned
from grpo_dist.tools.plan.sweep import bound, likeliest, own_cell

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
# Benchmarks of two cores: of the same model where there is one, else of the demo's.
_CPU_RECORDS = {"demo:smollm2": "configs/bench/measured/smollm2_2cores.json"}
_CPU_RECORD = "configs/bench/measured/demo_2cores.json"
GPUS = (1, 8, 16, 64, 128)
_STEPS = 2  # simulated steps of a line
_MARK = "#| "
_CARD = "H100"
# Recipes for machines without GPUs, whose models are too small for what a plan knows of GPUs.
_ON_CPUS = (
    "demo", "smollm2_sums", "smollm2_word_problems", "reasoning_gym_smollm2", "r1_zero_smollm2",
    "tools_demo", "pools_demo", "gsm8k_cpu_smoke", "word_problems", "cpu_13m",
    "cpu_13m_lognormal", "cpu_13m_tail", "cpu_13m_tools", "cpu_smollm2",
)  # fmt: skip
# A stand-in of the same shape for a model that a script writes.
_STAND_INS = {"word_problems": ["sft.model=demo:tiny"]}
_SPLIT = (
    "policy.num_workers", "policy.zero_stage", "rollout.num_workers", "rollout.tensor_parallel_size"
)  # fmt: skip
_AS_IT_IS = "as it is"
_IN_TURNS = "with max_staleness=0: "
_ROW = re.compile(
    rf"(\S+): ({_IN_TURNS})?(\d+) rank\(s\) of ZeRO-(\d), (\d+) engine\(s\) x TP (\d+), (\w+); "
    r".* \[(\w+)\]$"
)
_NO_RECORD = (
    f"times: data sheet of {_CARD} with assumed efficiencies; no benchmark of a GPU is recorded that could "
    "calibrate them"
)


@dataclass(frozen=True)
class Head:
    """The recipe in ``path``, planned on one cluster after the other."""

    path: Path
    config: Config

    @classmethod
    def of(cls, path: Path) -> Head:
        return cls(path, load_config(path, _STAND_INS.get(path.stem, [])))

    @property
    def is_for_cpus(self) -> bool:
        return self.path.stem in _ON_CPUS

    @property
    def _cpu_record(self) -> str:
        trained = self.config.sft.model if self.config.sft else self.config.model.path
        return _CPU_RECORDS.get(trained, _CPU_RECORD)

    def lines(self) -> list[str]:
        """Return the whole head. It simulates the fastest split of each size."""
        if self.is_for_cpus:
            source = f"times: calibrated with {self._cpu_record}; GPUs are not planned"
            return self._framed([self.own_row()], source)
        found = [self.own_row(), *(self._best_row(cluster_of(gpus)) for gpus in GPUS)]
        return self._framed(found, _NO_RECORD)

    def _best_row(self, cluster: str) -> str:
        """Return the line of the most promising split; where none can run, of one without staleness."""
        setting, cell, ahead = (
            self._setting(cluster),
            own_cell(self.config.batch, self.config.max_staleness),
            "",
        )
        best = likeliest(self.config, setting, cell)
        if isinstance(best, str) and cell.staleness:
            best, ahead = likeliest(self.config, setting, replace(cell, staleness=0)), _IN_TURNS
        if isinstance(best, str):
            return f"{cluster}: no split of the GPUs can run, {best}"
        return _row(planned(best, steps=_STEPS), setting, ahead)

    def own_row(self) -> str:
        """Return the line of the file as it is, on as many GPUs as it uses. Raises UserError for a file that
        cannot run there.
        """
        if self.is_for_cpus:
            setting = self._setting("1x0xCPU", self._cpu_record)
        else:
            setting = self._setting(cluster_of(_gpus_of(self.config)))
        option = option_of(self.config, setting)
        if option.problems:
            raise UserError(
                f"{self.path}: {_AS_IT_IS}, it cannot run on {setting.cluster}: {'; '.join(option.problems)}"
            )
        return f"{_AS_IT_IS}, {_row(planned(option, steps=_STEPS), setting)}"

    def digests(self, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the digest that a line of ``lines`` states, and that of its split now, without simulating."""
        record = self._cpu_record if self.is_for_cpus else None
        for line in lines:
            if found := _ROW.search(line):
                numbers = dict(zip(_SPLIT, (int(found[i]) for i in range(3, 7)), strict=True))
                ahead = {"max_staleness": 0} if found[2] else {}
                changes = numbers | ahead | {"cluster.placement": found[7]}
                own = self.config if line.startswith(_AS_IT_IS) else changed(self.config, changes)
                yield found[8], digest_of(option_of(own, self._setting(found[1], record)))

    def _framed(self, rows: Sequence[str], source: str) -> list[str]:
        first = "Expected by `python -m grpo_dist.tools.plan.heads`, at this file's batch and staleness"
        return [_MARK + line for line in (first, *rows, source)]

    def _setting(self, cluster: str, record: str | None = None) -> Setting:
        bench = CONFIGS.parent / record if record else None
        return made_setting(self.config, parse_cluster(cluster), Assumptions(bench=bench))


def cluster_of(gpus: int) -> str:
    """Return the name of so many GPUs in nodes of eight: 16 -> 2x8xH100."""
    return f"1x{gpus}x{_CARD}" if gpus < 8 else f"{-(-gpus // 8)}x8x{_CARD}"


def recipes() -> list[Path]:
    """Return all configurations that are recipes or benchmarks, without presets and pipelines."""
    return sorted([*CONFIGS.glob("*.yaml"), *(CONFIGS / "bench").glob("*.yaml")])


def read(path: Path) -> list[str]:
    """Return the lines of the head in a file, without their mark."""
    return [x.removeprefix(_MARK) for x in path.read_text().splitlines() if x.startswith(_MARK)]


def with_head(text: str, lines: Sequence[str]) -> str:
    """Return ``text`` with ``lines`` after the comment at its begin, in place of those that are there."""
    rest = [line for line in text.splitlines() if not line.startswith(_MARK)]
    at = next((i for i, line in enumerate(rest) if not line.startswith("#")), len(rest))
    return "\n".join([*rest[:at], *lines, *rest[at:]]) + "\n"


def _gpus_of(config: Config) -> int:
    """Return the GPUs that a configuration uses, found on a cluster with more than enough."""
    plenty = parse_cluster(f"64x8x{_CARD}")
    placed = config.cluster.placement == "colocated"
    separate = config if placed else changed(config, {"cluster.placement": "separate"})
    return option_of(separate, made_setting(config, plenty)).roles.gpus


def _row(made: Planned, setting: Setting, ahead: str = "") -> str:
    option, run = made.option, made.simulated
    cluster, config = setting.cluster, option.config
    hours = config.steps * run.step_s / 3600
    used = f"; {cluster.gpus * hours:,.1f} GPU-hours for {config.steps} steps" if cluster.gpus else ""
    return (
        f"{cluster}: {ahead}{_split_words(option)}; {_memory_words(option, cluster)}; {run.step_s:.3g} s a "
        f"step, {run.tokens_per_s:,.0f} tokens/s{used} [{digest_of(option)}]"
    )


def _split_words(option: Option) -> str:
    policy, rollout, placement = option.config.policy, option.config.rollout, option.config.cluster.placement
    shared = "colocated" if option.roles.colocated else "separate"
    return (
        f"{policy.num_workers} rank(s) of ZeRO-{policy.zero_stage}, {rollout.num_workers} engine(s) x TP "
        f"{rollout.tensor_parallel_size}, {placement if placement != 'auto' else shared}"
    )


def _memory_words(option: Option, cluster: ClusterShape) -> str:
    workers = {role: need for role, need in option.memory.items() if role in option.roles.workers}
    needed = ", ".join(f"{role} {need.total / GIB:.1f}" for role, need in workers.items())
    return f"GiB of {'a GPU' if cluster.gpus else 'the machine'}: {needed}"


def digest_of(option: Option) -> str:
    """Return eight digits of the hash of what a plan knows of ``option`` before it is simulated."""
    known = {
        "memory": {role: [need.parts, need.host, need.host_first] for role, need in option.memory.items()},
        "bound": f"{bound(option):.6g}",
        "capacity": option.scenario.capacity,
        "steps": option.config.steps,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_dist.tools.plan.heads", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 for a stale head")
    check = parser.parse_args(arguments).check
    stale = []
    for path in recipes():
        text = path.read_text()
        now = with_head(text, Head.of(path).lines())
        if now != text:
            stale.append(path.name)
            if not check:
                write_text(path, now)
        print(f"{path.name}: {'changed' if now != text else 'up to date'}", flush=True)
    return 1 if stale and check else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(str(error))
