"""What a user may give to sbatch: a limit that leaves time to train, and options that submit leaves open."""

from __future__ import annotations

import math
import re
import shlex

from grpo_dist.errors import UserError

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE)
_SHUTDOWN_S = 120  # before the time limit, beyond `checkpoint.grace_s`
_STARTS_S = 420  # for Ray, the engines and a step, before the run is asked to end
_LOG = "the log is in the run directory: set `output_dir`"
_TASKS = "a job has one task per node"
# Option of sbatch, its letter, and what to do instead.
_DECIDED = (
    ("job-name", "J", "set `name`"),
    ("dependency", "d", "the job waits for earlier ones of its run: submit it when all else is there"),
    ("output", "o", _LOG),
    ("error", "e", _LOG),
    ("open-mode", "", "a requeued job appends to its log"),
    ("array", "a", "submit each run with its own `name`"),
    ("signal", "", "set `checkpoint.grace_s`"),
    ("chdir", "D", "submit from that directory"),
    ("clusters", "M", "submit on a machine of that cluster"),
    ("time", "t", "give --time"),
    ("nodes", "N", "give --nodes"),
    ("ntasks", "n", _TASKS),
    ("ntasks-per-node", "", _TASKS),
    ("cpus-per-task", "c", "give --cpus-per-node"),
    ("gpus-per-node", "", "give --gpus-per-node, and a type of GPU with --sbatch=--constraint=..."),
    ("no-requeue", "", "a job is requeued after a lost node and before its time limit"),
)
_OTHER = ("gpus",)  # an option of its own, although it begins one of the above


def before_end_s(grace_s: float) -> int:
    """Return how many seconds before the time limit the run is asked to end. ``grace_s``: of `checkpoint`."""
    return int(grace_s) + _SHUTDOWN_S


def check_time(limit: str, grace_s: float) -> None:
    """Raise UserError for a text that is no time limit, and for a limit that leaves no time to train."""
    if not _TIME.fullmatch(limit):
        raise UserError(f"--time {limit!r}: expected a limit such as 90 (minutes), 24:00:00 or 7-00:00:00")
    least_s = before_end_s(grace_s) + _STARTS_S
    if _seconds(limit) < least_s:
        raise UserError(
            f"--time {limit}: the run is asked to end {before_end_s(grace_s)} s before the limit "
            f"(`checkpoint.grace_s` + {_SHUTDOWN_S}), and would be requeued without a step; give at least "
            f"{math.ceil(least_s / 60)} minutes"
        )


def check_left_open(option: str) -> None:
    """Raise UserError for an option of sbatch that submit sets itself, as ``--long``, abbreviated, or ``-l``.

    A directive may have several options: "--partition=gpu --mem=0".
    """
    try:
        words = shlex.split(option)
    except ValueError:  # an unpaired quote, as in a comment
        words = option.split()
    for word in words:
        name = word.partition("=")[0]
        for long, letter, instead in _DECIDED:
            if _names(name, long, letter):
                raise UserError(f"--sbatch={option}: submit sets --{long} itself; {instead}")


def _names(word: str, long: str, letter: str) -> bool:
    """Return whether ``word`` is the option ``long``. sbatch accepts abbreviations."""
    if word.startswith("--"):
        return len(word) > 2 and long.startswith(word[2:]) and word[2:] not in _OTHER
    return bool(letter) and word.startswith(f"-{letter}")


def _seconds(limit: str) -> float:
    """Convert a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. No limit is infinite: 0, UNLIMITED."""
    if not limit[0].isdecimal():
        return math.inf
    days, dash, rest = limit.rpartition("-")
    numbers = [int(text) for text in rest.split(":")]
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    total = int(days or 0) * 86_400 + sum(n * unit for n, unit in zip(numbers, units, strict=False))
    return total or math.inf
