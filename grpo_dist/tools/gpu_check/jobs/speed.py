"""Tokens per second of the trainer and of a bare loop, each in its own process.

The bare loop has rows that share nothing, with as many tokens and as much attention as the trainer's rows
need: a prompt once for its group.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.runtime.hardware import available_cpus, resolve_dtype
from grpo_dist.tools.bench.limits import run_jobs
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.sizes import dtype_of, update_config, update_size
from grpo_dist.tools.gpu_check.trainers import model_dir_of, run_trainers, trainer_sections
from grpo_dist.tools.plan.models import model_of

_REPEATS = 3
_OTHER = (
    "it has the bare loop's products, and a copy of the gradients: at half its speed it takes another path"
)


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    found, dtype = Findings(), dtype_of(task)
    size = update_size(task, dtype=dtype, zero_stage=1)
    config = update_config(task, size, dtype=dtype, zero_stage=1)
    (own,) = run_trainers(trainer_sections(config), size, timed=True)
    needed = size.work
    row = needed.row_tokens(size.row)
    rows = round(needed.tokens / row)
    job = {
        "model_dir": model_dir_of(config.model, config.seed),
        "dtype": resolve_dtype(config.model.dtype),
        "rows": rows,
        "row_tokens": row,
        "trained_share": needed.trained / needed.tokens,
        "repeats": _REPEATS,
    }
    (bare,) = run_jobs("grpo_dist.tools.bench.limit_training", [job], threads=available_cpus(), gpus=1)
    tokens, update_s = size.rows * size.row, own["update_s"]
    limit_s = min(bare["seconds"]) * needed.tokens / (rows * row)
    model = model_of(config.model, config.sft, config.seed)
    work = needed.flops(model.shape)
    found.figures |= {
        "speed/tokens_per_s": tokens / update_s,
        "speed/limit_tokens_per_s": tokens / limit_s,
        "speed/of_limit": limit_s / update_s,
        "speed/of_matrix_rate": work / update_s / bare["matmul"],
        "speed/limit_of_matrix_rate": work / limit_s / bare["matmul"],
    }
    of_limit, of_matrices = (
        written(found.figures[f"speed/{name}"], "%") for name in ("of_limit", "of_matrix_rate")
    )
    rate = written(tokens / update_s, "tokens/s")
    found.notes.append(f"{rate}, {of_limit} of a bare loop, {of_matrices} of the matrix rate")
    if task.rehearsal:
        found.at_least("tokens per second", tokens / update_s, 1.0, "it trains")
    else:
        found.at_least("speed, share of a bare loop", limit_s / update_s, 0.5, _OTHER)
    yield "speed", found
