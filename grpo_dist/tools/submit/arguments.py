"""The command line of `grpo-dist submit`, `status`, `logs` and `stop`. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from grpo_dist.tools.arguments import add_command, add_inputs


def add_commands(commands: Any) -> None:
    _add_submit(commands)
    for name, command, text in (
        ("status", _status, "show the state of a submitted run"),
        ("logs", _logs, "print the log of a submitted run"),
        ("stop", _stop, "ask a submitted run to save a checkpoint and end"),
    ):
        sub = add_command(commands, name, text, command, overrides=[])
        sub.add_argument("config", metavar="RUN", help="run directory, e.g. runs/my-run")
        if name == "logs":
            sub.add_argument("--follow", action="store_true", help="follow the log until the job ends")


def _add_submit(commands: Any) -> None:
    text = (
        "train on a cluster: Ray by its Jobs API, Slurm by sbatch, Kubernetes by a RayJob (launch/README.md "
        "compares them). Submitting a run again resumes it"
    )
    sub = add_command(commands, "submit", text, _submit)
    add_inputs(sub, "YAML file, e.g. configs/demo.yaml", "as for `grpo-dist train`")
    sub.add_argument("--to", required=True, choices=("ray", "slurm", "kuberay"))
    sub.add_argument("--dry-run", action="store_true", help="print exactly what would be submitted")
    sub.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="an environment variable of the job; NAME alone passes the value set here and hides it",
    )  # fmt: skip
    sub.add_argument("--address", metavar="URL", help="ray: http://HEAD:8265; default RAY_ADDRESS")
    sub.add_argument(
        "--driver-cpus", type=float, metavar="N",
        help="ray: CPUs reserved for the driver on the head (default 1; 0 for a head without CPUs)",
    )  # fmt: skip
    _add_slurm_and_kuberay(sub)


def _add_slurm_and_kuberay(sub: Any) -> None:
    sub.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="slurm, kuberay: 0 for nodes without GPUs"
    )
    sub.add_argument(
        "--cpus-per-node", type=int, metavar="N", help="slurm, kuberay: default 8 per GPU, at least 16"
    )
    sub.add_argument(
        "--nodes", type=int, metavar="N", help="slurm, kuberay: default the fewest that fit the run"
    )
    sub.add_argument(
        "--time", metavar="LIMIT", help="slurm: default 24:00:00; the job is requeued at the limit"
    )
    sub.add_argument(
        "--sbatch", action="append", metavar="OPTION", help="slurm: e.g. --sbatch=--partition=gpu"
    )
    sub.add_argument(
        "--setup",
        action="append",
        metavar="COMMAND",
        help="slurm: shell command to run first, e.g. --setup 'module load cuda'",
    )
    sub.add_argument("--image", help="kuberay: image built with docker/Dockerfile")
    sub.add_argument(
        "--volume", metavar="CLAIM:/PATH", help="kuberay: volume that holds the runs, mounted in all pods"
    )
    sub.add_argument(
        "--memory-gib", type=int, metavar="N", help="kuberay: memory of a node, default 64 per GPU"
    )
    sub.add_argument("--head-cpus", type=int, metavar="N", help="kuberay: CPUs of the head pod, default 8")
    sub.add_argument(
        "--head-memory-gib", type=int, metavar="N", help="kuberay: memory of the head pod, default 64"
    )
    sub.add_argument(
        "--retries",
        type=int,
        metavar="N",
        help="kuberay: retries on a new cluster after a failure, default 3",
    )
    sub.add_argument("--namespace", help="kuberay: default the namespace of the kubectl context")
    sub.add_argument(
        "--secret",
        action="append",
        metavar="NAME[:KEY]",
        help="kuberay: a Secret whose keys become environment variables",
    )


def _submit(path: str, overrides: list[str], **options: Any) -> None:
    from grpo_dist.tools.submit.commands import submit  # loads the configuration, which --help does not need

    submit(path, overrides, **options)


def _status(run_dir: str, overrides: list[str]) -> None:
    from grpo_dist.tools.submit.commands import status  # loads the configuration, which --help does not need

    status(run_dir)


def _logs(run_dir: str, overrides: list[str], follow: bool) -> None:
    from grpo_dist.tools.submit.commands import logs  # loads the configuration, which --help does not need

    logs(run_dir, follow)


def _stop(run_dir: str, overrides: list[str]) -> None:
    from grpo_dist.tools.submit.commands import stop  # loads the configuration, which --help does not need

    stop(run_dir)
