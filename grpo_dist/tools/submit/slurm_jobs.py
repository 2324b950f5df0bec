"""Slurm target: one sbatch file, `launch/slurm.sbatch` with the job's settings.

All jobs of a run have the same name, and `singleton` lets only one run at a time.
"""

from __future__ import annotations

import getpass
import math
import re
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from grpo_dist.errors import UserError
from grpo_dist.tools.submit.checks import NodeSizes, check_one_line, check_options
from grpo_dist.tools.submit.job import Job, JobState, Refused, SubmissionRecord, ask, read_record, template

_BEGIN, _END = "# >>> settings\n", "# <<< settings\n"
_READ = re.compile(r"=[\"']?[$`][^;&|\n]*")  # a variable set from another variable or a command
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SUSPENDED", "STOPPED")
_RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT")
_LIVE = _WAITING + _RUNNING
_EVERY_S = 2.0  # between reads of the log
_ASKED_EVERY_S = 10.0  # between queries of the controller
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE)
_SHUTDOWN_S = 120  # before the time limit, added to `checkpoint.grace_s`
_STARTS_S = 420  # for Ray, the engines and a step, before the stop request
# Options of sbatch that submit sets, after the user's options, which they override.
_DECIDED = (
    "job-name", "dependency", "output", "error", "open-mode", "array", "signal", "chdir", "clusters", "time",
    "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "no-requeue",
)  # fmt: skip
# Short forms of unsupported options, which submit does not override: a second log, several tasks per run, and
# another cluster, where `status` and `stop` do not look.
_WITHOUT = {"-e": "error", "-a": "array", "-n": "ntasks", "-M": "clusters"}


@dataclass(frozen=True)
class SlurmTarget(NodeSizes):
    """Options of --to slurm. ``after``: run directories whose jobs must succeed first. ``sbatch``: options of
    sbatch. ``setup``: shell commands to run first.
    """

    time: str = "24:00:00"
    after: list[str] = field(default_factory=list)
    sbatch: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)

    def check(self, job: Job) -> None:
        """Raise UserError for a job that cannot be submitted. Does not contact Slurm."""
        options = [("--sbatch", text) for text in self.sbatch]
        options += [("--setup", _READ.sub("=", text)) for text in self.setup]
        check_options(options)
        for option in self.sbatch:
            if not option.startswith("-"):
                raise UserError(f"--sbatch={option}: expected an option, e.g. --sbatch=--partition=gpu")
            check_one_line("--sbatch", option)
            check_left_open(option)
        for run_dir in self.after:
            _succeeded(run_dir)
        check_time(self.time, job.config.checkpoint.grace_s)
        for what, path in (("the current directory", Path.cwd()), ("the run directory", job.run_dir)):
            check_one_line(what, str(path))
            if "\\" in str(path):
                raise UserError(f"{what} = {path} has a backslash, which Slurm treats specially")
        self.nodes_for(job.config, "slurm")

    def render(self, job: Job) -> str:
        head, _, rest = template("slurm.sbatch").partition(_BEGIN)
        return head + _BEGIN + self._settings(job) + _END + rest.partition(_END)[2]

    def submit(self, job: Job) -> SubmissionRecord:
        other = _live(job)
        if other:
            raise UserError(
                f"{job.run_dir}: its job {other} is pending or running; end it with `grpo-dist stop "
                f"{job.run_dir}`, or choose another `name`"
            )
        job.run_dir.mkdir(parents=True, exist_ok=True)
        # "1234" or "1234;cluster"
        number = ask(["sbatch", "--parsable"], stdin=self.render(job)).strip().split(";")[0]
        return SubmissionRecord(
            "slurm", number, str(job.run_dir), log=str(job.run_dir / f"slurm-{number}.log")
        )

    def _settings(self, job: Job) -> str:
        nodes, described = self.nodes_for(job.config, "slurm")
        options = [
            *self.sbatch,
            f"--job-name={job.name}",
            f"--nodes={nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            f"--cpus-per-task={self.cpus}",
            f"--time={self.time}",
            f"--signal=B:USR1@{signal_before_end_s(job.config.checkpoint.grace_s)}",
            "--requeue",
            "--open-mode=append",
            f"--dependency={','.join(['singleton', *map(_succeeded, self.after)])}",
            *(["--kill-on-invalid-dep=yes"] if self.after else []),
            f"--chdir={shlex.quote(str(Path.cwd()))}",
            f"--output={shlex.quote(_pattern(job, 'slurm-%j.log'))}",
        ]
        # The submitting environment is on a shared file system, available on every node.
        prepare = [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
        prepare += [f"export {v.name}={shlex.quote(v.value)}" for v in job.environment if not v.hidden]
        # Slurm passes the submitting shell's variables to the job.
        prepare += [f': "${{{v.name}?was not set there}}"' for v in job.environment if v.hidden]
        prepare += self.setup
        train = ["grpo-dist", "train", str(job.path), *job.overrides, "cluster.address=null"]
        train += ["cluster.grows_to=null"] if job.config.cluster.grows_to else []
        return (
            "".join(f"#SBATCH {option}\n" for option in options)
            + f"# {' '.join(described.split())}\n"
            + "prepare() {\n" + "".join(f"    {line}\n" for line in prepare) + "}\n"
            + f"train=({shlex.join(train)})\n"
            + f"nodes_log={shlex.quote(_pattern(job, 'slurm-%j-nodes.log'))}\n"
            + "nodes_deadline_s=600 # for all nodes to join\nmost_requeues=100\n"
        )  # fmt: skip


def state(record: SubmissionRecord) -> JobState:
    try:
        # All states: without accounting, squeue alone knows an ended job, for some minutes.
        queue = ["squeue", "--noheader", "--states=all", "--jobs", record.job, "--format", "%T|%M|%R"]
        answer = ask(queue).strip()
    except Refused as error:
        if "invalid job id" not in str(error).lower():
            raise  # no answer: the state is unknown
        answer = ""
    queued = None
    if answer:
        name, elapsed, reason = answer.splitlines()[0].split("|", 2)
        queued = JobState(f"{name}, {elapsed} ({reason.strip('()')})", live=name in _LIVE)
        if queued.live:
            return queued
    accounting = ["sacct", "--noheader", "--allocations", "--parsable2", "--jobs", record.job]
    try:
        rows = ask([*accounting, "--format", "State,ExitCode,Elapsed"]).strip().splitlines()
    except Refused:  # no accounting on this cluster
        rows = []
    if not rows:
        return queued or JobState("over; squeue and sacct no longer know the job", live=False)
    name, exit_code, elapsed = rows[-1].split("|")
    return JobState(f"{name}, exit code {exit_code.split(':')[0]}, {elapsed}", live=name in _LIVE)


def print_logs(record: SubmissionRecord, follow: bool) -> None:
    """Print the job's log file; with ``follow`` also new lines until the job ends."""
    path, read, over, asked_at = Path(record.log), 0, not follow, -_ASKED_EVERY_S
    while True:
        if not over and time.monotonic() - asked_at >= _ASKED_EVERY_S:
            over, asked_at = not state(record).live, time.monotonic()
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(read)
                print(file.read(), end="", flush=True)
                read = file.tell()
        elif over:
            raise UserError(f"{path} does not exist; state of the job: {state(record).text}")
        if over:
            return
        time.sleep(_EVERY_S)


def stop(record: SubmissionRecord) -> None:
    """Ask a running job to save a checkpoint and end; cancel a pending one."""
    if state(record).text.startswith(_RUNNING):
        ask(["scancel", "--signal=USR2", "--batch", record.job])
    else:
        ask(["scancel", record.job])


def _succeeded(run_dir: str) -> str:
    """Return the dependency on the last job of ``run_dir``. Raises UserError if there is none."""
    record = read_record(Path(run_dir))
    if record is None or record.target != "slurm":
        raise UserError(
            f"--after {run_dir}: no job was submitted to Slurm for this run directory; submit that run first"
        )
    return f"afterok:{record.job}"


def _live(job: Job) -> str:
    """Return the id of this run's pending or running job, or ""."""
    answer = ask(["squeue", "--noheader", "--user", getpass.getuser(), "--name", job.name, "--format", "%i"])
    return answer.split()[0] if answer.split() else ""


def _pattern(job: Job, name: str) -> str:
    """Return a run file's path, escaped for Slurm, which expands %j, %x and others."""
    return str(job.run_dir).replace("%", "%%") + f"/{name}"


# Checks of the user's sbatch options


def signal_before_end_s(grace_s: float) -> int:
    """Return the seconds from the stop request to the time limit. ``grace_s``: `checkpoint.grace_s`."""
    return int(grace_s) + _SHUTDOWN_S


def check_time(limit: str, grace_s: float) -> None:
    """Raise UserError for an invalid time limit, or one that leaves no time to train."""
    if not _TIME.fullmatch(limit):
        raise UserError(f"--time {limit!r}: expected a limit such as 90 (minutes), 24:00:00 or 7-00:00:00")
    least_s = signal_before_end_s(grace_s) + _STARTS_S
    if _limit_s(limit) < least_s:
        raise UserError(
            f"--time {limit}: the run is asked to end {signal_before_end_s(grace_s)} s before the limit "
            f"(`checkpoint.grace_s` + {_SHUTDOWN_S}), and would be requeued without a step; give at least "
            f"{math.ceil(least_s / 60)} minutes"
        )


def check_left_open(option: str) -> None:
    """Raise UserError for a forbidden option of sbatch. A directive may have several options, possibly
    abbreviated: "--partition=gpu --mem=0".
    """
    for word in option.split():
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--"):
            decided = [long for long in _DECIDED if name and name != "gpus" and long.startswith(name)]
        else:
            decided = [long for letter, long in _WITHOUT.items() if word.startswith(letter)]
        if decided:
            raise UserError(
                f"--sbatch={option}: submit decides --{decided[0]}; use its own options (--nodes, --time, "
                "--after, ...) and the keys `name`, `output_dir` and `checkpoint.grace_s`"
            )


def _limit_s(limit: str) -> float:
    """Convert a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. No limit is infinite: 0, UNLIMITED."""
    if not limit[0].isdecimal():
        return math.inf
    days, dash, rest = limit.rpartition("-")
    numbers = [int(text) for text in rest.split(":")]
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    total = int(days or 0) * 86_400 + sum(n * unit for n, unit in zip(numbers, units, strict=False))
    return total or math.inf
