"""The command line of `grpo-dist submit`, `status`, `logs` and `stop`. Imports nothing heavy."""

from __future__ import annotations

from typing import Any


def add_commands(commands: Any) -> None:
    _add_submit(commands)
    for name, command, text in (
        ("status", _status, "what became of a run that was submitted"),
        ("logs", _logs, "what a submitted run prints"),
        ("stop", _stop, "ask a submitted run to save a checkpoint and end"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("config", metavar="RUN", help="run directory, e.g. runs/my-run")
        sub.set_defaults(command=command, overrides=[])
        if name == "logs":
            sub.add_argument("--follow", action="store_true", help="go on until the job is over")


def _add_submit(commands: Any) -> None:
    text = (
        "train on a cluster: Ray by its Jobs API, Slurm by sbatch, Kubernetes by a RayJob (launch/README.md: "
        "which when). Submitted again, a run goes on where it was"
    )
    sub = commands.add_parser("submit", help=text, description=text)
    sub.add_argument("config", help="YAML file, e.g. configs/demo.yaml")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="as of `grpo-dist train`")
    sub.add_argument("--to", required=True, choices=("ray", "slurm", "kuberay"))
    sub.add_argument("--dry-run", action="store_true", help="print exactly what would be submitted")
    sub.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable of the job's environment; NAME alone: as it is here, shown to nobody",
    )  # fmt: skip
    sub.add_argument("--address", metavar="URL", help="ray: http://HEAD:8265; default RAY_ADDRESS")
    sub.add_argument(
        "--driver-cpus", type=float, metavar="N",
        help="ray: reserved for the driver on the head (default 1; 0 for a head without CPUs)",
    )  # fmt: skip
    sub.add_argument("--gpus-per-node", type=int, metavar="N", help="slurm, kuberay: 0 for nodes without")
    sub.add_argument(
        "--cpus-per-node", type=int, metavar="N", help="slurm, kuberay: default 8 a GPU, at least 16"
    )
    sub.add_argument("--nodes", type=int, metavar="N", help="slurm, kuberay: default the fewest that suffice")
    sub.add_argument("--time", metavar="LIMIT", help="slurm: default 24:00:00; then queued again")
    sub.add_argument(
        "--sbatch", action="append", metavar="OPTION", help="slurm: e.g. --sbatch=--partition=gpu"
    )
    sub.add_argument(
        "--setup",
        action="append",
        metavar="COMMAND",
        help="slurm: run first, e.g. --setup 'module load cuda'",
    )
    sub.add_argument("--image", help="kuberay: made with docker/Dockerfile")
    sub.add_argument("--volume", metavar="CLAIM:/PATH", help="kuberay: where runs are kept, for all pods")
    sub.add_argument("--memory-gib", type=int, metavar="N", help="kuberay: of a node, default 64 a GPU")
    sub.add_argument("--head-cpus", type=int, metavar="N", help="kuberay: of the head's pod, default 8")
    sub.add_argument("--head-memory-gib", type=int, metavar="N", help="kuberay: likewise, default 64")
    sub.add_argument(
        "--retries", type=int, metavar="N", help="kuberay: on a new cluster after a failure, default 3"
    )
    sub.add_argument("--namespace", help="kuberay: default that of the context")
    sub.add_argument(
        "--secret",
        action="append",
        metavar="NAME[:KEY]",
        help="kuberay: a Secret whose keys become variables",
    )
    sub.set_defaults(command=_submit)


def _submit(path: str, overrides: list[str], **options: Any) -> None:
    from grpo_dist.tools.submit.commands import submit

    submit(path, overrides, **options)


def _status(run_dir: str, overrides: list[str]) -> None:
    from grpo_dist.tools.submit.commands import status

    status(run_dir)


def _logs(run_dir: str, overrides: list[str], follow: bool) -> None:
    from grpo_dist.tools.submit.commands import logs

    logs(run_dir, follow)


def _stop(run_dir: str, overrides: list[str]) -> None:
    from grpo_dist.tools.submit.commands import stop

    stop(run_dir)
