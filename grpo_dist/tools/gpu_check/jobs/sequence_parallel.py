"""Two ranks that share sequences, against one rank that has them whole."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.tools.bench.table import written
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.jobs.update import compare
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.sizes import dtype_of, update_config, update_size
from grpo_dist.tools.gpu_check.trainers import run_trainers, trainer_sections


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    found, dtype = Findings(), dtype_of(task)
    size = update_size(task, dtype=dtype, zero_stage=2)
    alone = update_config(task, size, dtype=dtype, zero_stage=2)
    shared = update_config(task, size, dtype=dtype, zero_stage=2, num_workers=2, sequence_parallel=2)
    (one,) = run_trainers(trainer_sections(alone), size, timed=True)
    two = run_trainers(trainer_sections(shared), size, timed=True)
    compare(task, found, two[0], one, dtype=dtype, what="two ranks and one")
    found.true("norms of both ranks, the same", two[0]["norm"] == two[1]["norm"], "one gradient")
    found.figures |= {
        "sequence-parallel/update_s": two[0]["update_s"],
        "sequence-parallel/of_one_rank": one["update_s"] / two[0]["update_s"],
        "sequence-parallel/peak_bytes": float(two[0]["peak_bytes"]),
    }
    faster = written(one["update_s"] / two[0]["update_s"], "x")
    found.notes.append(f"{faster} as fast as one rank")
    yield "sequence-parallel", found
