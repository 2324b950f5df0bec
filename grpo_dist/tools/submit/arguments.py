"""The command line of `grpo-dist submit`, `status`, `logs` and `stop`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_dist.tools.arguments import add_command, add_inputs

_NODES = "slurm, kuberay: "
# (option, metavar, type, help); list: may be given several times
_OPTIONS: tuple[tuple[str, str | None, type, str], ...] = (
    ("env", "NAME[=VALUE]", list, "an environment variable of the job; NAME alone passes the value set here "
     "and hides it"),
    ("address", "URL", str, "ray: http://HEAD:8265; default RAY_ADDRESS"),
    ("driver-cpus", "N", float, "ray: CPUs reserved for the driver on the head (default 1; 0 for a head "
     "without CPUs)"),
    ("gpus-per-node", "N", int, f"{_NODES}0 for nodes without GPUs"),
    ("cpus-per-node", "N", int, f"{_NODES}default 8 per GPU, at least 16"),
    ("nodes", "N", int, f"{_NODES}default the fewest that fit the run"),
    ("time", "LIMIT", str, "slurm: default 24:00:00; the job is requeued at the limit"),
    ("after", "RUN", list, "slurm: begin when the job of this run directory has succeeded"),
    ("sbatch", "OPTION", list, "slurm: e.g. --sbatch=--partition=gpu"),
    ("setup", "COMMAND", list, "slurm: shell command to run first, e.g. --setup 'module load cuda'"),
    ("image", None, str, "kuberay: image built with docker/Dockerfile"),
    ("volume", "CLAIM:/PATH", str, "kuberay: volume that holds the runs, mounted in all pods"),
    ("memory-gib", "N", int, "kuberay: memory of a node, default 64 per GPU"),
    ("namespace", None, str, "kuberay: default the namespace of the kubectl context"),
    ("secret", "NAME[:KEY]", list, "kuberay: a Secret whose keys become environment variables"),
)  # fmt: skip


def add_commands(commands: Any) -> None:
    text = (
        "train on a cluster: Ray by its Jobs API, Slurm by sbatch, Kubernetes by a RayJob (launch/README.md "
        "compares them). Submitting a run again resumes it"
    )
    sub = add_command(commands, "submit", text, _later("submit"))
    add_inputs(sub, "YAML file, e.g. configs/demo.yaml", "as for `grpo-dist train`")
    sub.add_argument("--to", required=True, choices=("ray", "slurm", "kuberay"))
    sub.add_argument("--dry-run", action="store_true", help="print exactly what would be submitted")
    for name, metavar, kind, text in _OPTIONS:
        how: dict[str, Any] = {"action": "append"} if kind is list else {"type": kind}
        sub.add_argument(f"--{name}", metavar=metavar, help=text, **how)
    for name, text in (
        ("status", "show the state of a submitted run"),
        ("logs", "print the log of a submitted run"),
        ("stop", "ask a submitted run to save a checkpoint and end"),
    ):
        sub = add_command(commands, name, text, _later(name), overrides=())
        sub.add_argument("config", metavar="RUN", help="run directory, e.g. runs/my-run")
        if name == "logs":
            sub.add_argument("--follow", action="store_true", help="follow the log until the job ends")


def _later(name: str) -> Callable[..., None]:
    """Return a function that calls ``commands.NAME``, which loads the configuration; --help does not."""

    def run(*arguments: Any, **options: Any) -> None:
        from grpo_dist.tools.submit import commands

        getattr(commands, name)(*arguments, **options)

    return run
