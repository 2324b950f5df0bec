"""`grpo-dist submit`, `status`, `logs` and `stop`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from grpo_dist.config.files import load_config
from grpo_dist.errors import UserError
from grpo_dist.tools.submit import kuberay, ray_jobs, slurm_jobs
from grpo_dist.tools.submit.checks import (
    check_no_secrets,
    check_one_line,
    check_resumes,
    check_rewards_known,
    format_option,
    variables,
)
from grpo_dist.tools.submit.job import Job, SubmissionRecord, read_record, run_directory

# Target class, and the module with `state`, `print_logs` and `stop` of a record.
_TARGETS: dict[str, tuple[Any, ModuleType]] = {
    "ray": (ray_jobs.RayTarget, ray_jobs),
    "slurm": (slurm_jobs.SlurmTarget, slurm_jobs),
    "kuberay": (kuberay.KubeRayTarget, kuberay),
}


class Target(Protocol):
    def check(self, job: Job) -> None:
        """Raise UserError for a job that cannot be submitted."""

    def render(self, job: Job) -> str:
        """Return the exact submission, with *** for secrets."""

    def submit(self, job: Job) -> SubmissionRecord:
        """Submit the job. Raises UserError if the run is already pending or running."""


def submit(
    path: str, overrides: Sequence[str], to: str, dry_run: bool, env: list[str] | None, **options: Any
) -> None:
    """Check a job, then print or submit it. ``options``: command-line options, None if not given."""
    config = load_config(path, overrides)
    check_one_line("`output_dir`", config.output_dir)
    check_resumes(config, run_directory(config.name, config.output_dir))
    check_rewards_known(config)
    job = Job(config, Path(path).resolve(), tuple(overrides), variables(env or ()))
    target = _target(to, options)
    check_no_secrets(job)
    target.check(job)
    if dry_run:
        print(target.render(job), end="")
        return
    record = target.submit(job)
    record.write()
    print(f"submitted to {to}{' at ' + record.where if record.where else ''}: {record.job}")
    for command in ("status", "logs --follow", "stop"):
        print(f"  grpo-dist {command} {job.run_dir}")


def status(run_dir: str, overrides: Sequence[str] = ()) -> None:
    record, module = _submission(run_dir)
    state = module.state(record)
    print(f"{record.job} on {record.target}, submitted {record.submitted_at}: {state.text}")


def logs(run_dir: str, overrides: Sequence[str] = (), *, follow: bool) -> None:
    record, module = _submission(run_dir)
    with suppress(KeyboardInterrupt):  # ends --follow
        module.print_logs(record, follow)


def stop(run_dir: str, overrides: Sequence[str] = ()) -> None:
    record, module = _submission(run_dir)
    state = module.state(record)
    if not state.live:
        print(f"{record.job} is over: {state.text}")
        return
    module.stop(record)
    print(f"{record.job}: asked to stop; it saves a checkpoint, from which the next submission resumes")


def _target(to: str, options: dict[str, Any]) -> Target:
    """Build the target. Raises UserError for another target's option."""
    set_options = {name: value for name, value in options.items() if value is not None}
    build, _ = _TARGETS[to]
    fields = build.__dataclass_fields__
    if foreign := sorted(set(set_options) - set(fields)):
        option_names = ", ".join(map(format_option, fields))
        option = format_option(foreign[0])
        raise UserError(f"{option} is not an option of --to {to}, which has {option_names}")
    target: Target = build(**set_options)
    return target


def _submission(run_dir: str) -> tuple[SubmissionRecord, ModuleType]:
    """Return the record of a run's last submission, and its target's module."""
    record = read_record(Path(run_dir))
    if record is None:
        raise UserError(
            f"{run_dir}: nothing was submitted for this run directory from here; expected "
            "`output_dir`/`name` of a submitted configuration"
        )
    if record.target not in _TARGETS:
        raise UserError(f"{run_dir}: submitted to {record.target}; expected one of {', '.join(_TARGETS)}")
    return record, _TARGETS[record.target][1]
