"""The lines of the check: what each measures, and what it needs. Imports nothing heavy.

Lines that need the same workers share a job, which is one process of `jobs`. It reports each line as soon as
it is known, so what goes wrong later leaves the earlier ones as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Needs:
    """``gpus``: that many; ``bfloat16``: their arithmetic knows it; ``modules``: packages that are installed.
    ``memory_gib``: of each GPU, at least.
    """

    gpus: int = 1
    bfloat16: bool = True
    memory_gib: int = 0
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"]
        parts += [f"of {self.memory_gib} GiB"] if self.memory_gib else []
        parts += ["with bfloat16"] if self.bfloat16 else []
        return " ".join(parts) + "".join(f", {module}" for module in self.modules)


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One line of the report.

    Attributes:
        name: as printed, and in the record.
        about: what it shows.
        rehearsed: what of it runs without a GPU.
    """

    name: str
    about: str
    rehearsed: str


@dataclass(frozen=True, slots=True)
class CheckJob:
    """``module``: has ``measure(task)``. ``limit_s``: ended as hung after so long."""

    module: str
    limit_s: float
    needs: Needs
    lines: tuple[CheckLine, ...]
    argument: str = ""

    @property
    def name(self) -> str:
        """Return the name of its files: that of its first line."""
        return self.lines[0].name


_JOBS = "grpo_dist.tools.gpu_check.jobs"
MACHINE = "machine.json"  # in the directory of a check, written by `DEVICE`: `machine_facts`
_TRAINER = ("deepspeed",)
_ENGINE = ("deepspeed", "ray", "vllm")


def _zero(stage: int) -> CheckJob:
    dtype = "bfloat16" if stage else "float32"
    line = CheckLine(
        f"zero{stage}",
        f"an update of a 0.5B model at ZeRO-{stage} in {dtype}: packed against padded, memory against plan, "
        "states off and on bit by bit",
        "the same with a tiny model in float32; memory and moving states have no meaning there",
    )
    return CheckJob(
        f"{_JOBS}.update",
        150,
        Needs(bfloat16=stage > 0, memory_gib=20, modules=_TRAINER),
        (line,),
        str(stage),
    )


DEVICE = CheckJob(
    f"{_JOBS}.device",
    60,
    Needs(bfloat16=False),
    (
        CheckLine(
            "device",
            "the rate of a large matrix product and of copies within the device and to the host",
            "the same on the CPU",
        ),
    ),
)

# In the order in which they run, as the time may not suffice for all: what says most about a run comes first.
# `engine-graphs` makes the model and compiles what the engines of `steps` and `bench` then load.
JOBS: tuple[CheckJob, ...] = (
    DEVICE,
    CheckJob(
        f"{_JOBS}.attention",
        60,
        Needs(),
        (
            CheckLine(
                "attention",
                "variable-length attention over packed rows, forward and backward, against float64",
                "the blocks of rows that a CPU computes, in float32",
            ),
        ),
    ),
    CheckJob(
        f"{_JOBS}.head",
        60,
        Needs(memory_gib=8),
        (
            CheckLine(
                "head",
                "the LM head's log-probs, entropies and gradients in bfloat16 against their definition; "
                "speed; memory against plan",
                "values and gradients in bfloat16, whose products a CPU widens",
            ),
        ),
    ),
    CheckJob(
        f"{_JOBS}.engine",
        240,
        Needs(memory_gib=12, modules=_ENGINE),
        (
            CheckLine(
                "engine-graphs",
                "an engine starts with compilation and CUDA graphs, and drops its weights (level 2)",
                "an engine starts on the CPU, without compilation",
            ),
            CheckLine("seeds", "the same seeds give the same tokens, others give others", "the same"),
        ),
        "graphs",
    ),
    CheckJob(
        f"{_JOBS}.loop",
        240,
        Needs(memory_gib=20, modules=_ENGINE),
        (
            CheckLine("steps", "three steps of the real loop, engine and trainer on one GPU", "on the CPU"),
            CheckLine(
                "mismatch-bfloat16",
                "log-probs of engine and trainer in bfloat16, after every sync",
                "in float32: CPUs compute the engine's bfloat16 for few shapes only",
            ),
            CheckLine("turns", "engine and trainer take turns: seconds of each part", "on the CPU"),
            CheckLine(
                "sync", "weight sync by CUDA IPC, as a share of a copy within the device", "shared memory"
            ),
        ),
        "bfloat16",
    ),
    *(_zero(stage) for stage in (1, 2, 3)),
    CheckJob(
        f"{_JOBS}.short_bench",
        300,
        Needs(memory_gib=20, modules=_ENGINE),
        (CheckLine("bench", "a short benchmark of the loop with its limits", "with a tiny model"),),
    ),
    CheckJob(
        f"{_JOBS}.nccl",
        90,
        Needs(gpus=2, bfloat16=False, memory_gib=4, modules=("vllm",)),
        (
            CheckLine(
                "nccl",
                "weights travel by NCCL; a cut transfer ends at once, and the next group transfers",
                "the same over gloo",
            ),
        ),
    ),
    CheckJob(
        f"{_JOBS}.tensor_parallel",
        150,
        Needs(gpus=2, memory_gib=8, modules=_ENGINE),
        (
            CheckLine(
                "tensor-parallel",
                "an engine over two GPUs computes the trainer's log-probs",
                "an engine of one process",
            ),
        ),
    ),
    CheckJob(
        f"{_JOBS}.replace",
        150,
        Needs(memory_gib=12, modules=_ENGINE),
        (CheckLine("replace", "an engine is killed and replaced, and samples the same", "on the CPU"),),
    ),
    CheckJob(
        f"{_JOBS}.loop",
        150,
        Needs(bfloat16=False, memory_gib=20, modules=_ENGINE),
        (
            CheckLine(
                "mismatch-float32",
                "log-probs of engine and trainer in float32, after every sync",
                "on the CPU",
            ),
        ),
        "float32",
    ),
    CheckJob(
        f"{_JOBS}.sequence_parallel",
        90,
        Needs(gpus=2, memory_gib=20, modules=_TRAINER),
        (
            CheckLine(
                "sequence-parallel",
                "two ranks share sequences: gradients of one rank",
                "two processes over gloo",
            ),
        ),
    ),
    CheckJob(
        f"{_JOBS}.speed",
        120,
        Needs(memory_gib=20, modules=_TRAINER),
        (
            CheckLine(
                "speed",
                "tokens per second of the trainer, as a share of a bare loop on the tokens that it needs",
                "both loops on a tiny model",
            ),
        ),
    ),
    CheckJob(
        f"{_JOBS}.engine",
        90,
        Needs(memory_gib=12, modules=_ENGINE),
        (
            CheckLine(
                "engine-eager",
                "an engine starts without CUDA graphs, sleeps, and wakes with its weights",
                "an engine starts on the CPU; it cannot sleep there",
            ),
        ),
        "eager",
    ),
    _zero(0),
)


@dataclass(frozen=True, slots=True)
class CheckTask:
    """What a job is given. ``rehearsal``: without a GPU, tiny. ``directory``: for its files. ``known``: the
    figures of `DEVICE`.
    """

    argument: str
    rehearsal: bool
    directory: Path
    known: dict[str, float]
