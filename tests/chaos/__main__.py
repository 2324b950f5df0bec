"""``python -m tests.chaos [--short] [--each 20] [--steps 200] [--seed 0] [--only KIND ...] [key=value ...]``.

Exit code 0: every promise held for all jobs.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random

import psutil

from grpo_dist.loop.ledger import audit
from grpo_dist.observe.tracker import LEDGER
from tests.support import reward_models

from . import sandbox, verdict
from .events import SUPERVISED, Event
from .faults import Fault, TornFile, node_faults, start_faults, step_faults, visit_faults
from .job import CONFIG, Job, python_path
from .nodes import ELASTIC, OVERRIDES, Nodes
from .play import Group, Plan, Play, Stuck
from .report import goodput, step_s, table

_DISK_MB = 256
_PROMPTS_PER_STEP = 4  # as in job.yaml
_FAILED_JOBS = _IDLE_JOBS = 3  # further jobs would show nothing new


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    base = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # sockets below have short paths
    box = sandbox.enter(base / "disk", disk_mb=_DISK_MB)
    problems = []
    for kind in (Chaos, ChaosOfNodes, ChaosOfVisits):
        whole = kind(options, base, box)
        try:
            problems += whole.run() if whole.kinds else []
        finally:
            whole.close()
    if problems:
        shutil.copytree(box.disk, base / "kept", ignore=shutil.ignore_patterns("checkpoints", "filler"))
        print(f"FAILED: {len(problems)} promise(s); files and output of the runs are in {base}")
        print("\n".join(f"  {problem}" for problem in problems))
        return 1
    sandbox.leave(box.disk)
    shutil.rmtree(base, ignore_errors=True)
    print("every promise held")
    return 0


class Chaos:
    """Runs one undisturbed job, then jobs until all planned faults have struck."""

    def __init__(self, options: argparse.Namespace, base: Path, box: sandbox.Sandbox) -> None:
        self._options, self._base, self._box = options, base, box
        self._limits = verdict.BUSY if options.short else verdict.MEASURED
        self._nodes: Nodes | None = None
        self._rng = Random(options.seed)
        self._begin = time.monotonic()
        self._jobs: list[Job] = []
        self._events: list[Event] = []
        self._skipped: dict[str, str] = {}
        self._problems: list[str] = []
        self._shared = _shared_memory()
        self._classifier = reward_models.random(base / "classifier", "outcome")

    def run(self) -> list[str]:
        """Run all jobs; return broken promises. Continues after a broken promise, not after a stuck job."""
        calm = self._job("undisturbed")
        if not self._play(calm, Plan([], [])) or not self._passes(calm, self._check_every_job(calm, [])):
            return self._problems
        undisturbed, calm_s = verdict.read_metrics(calm.run_dir), step_s(calm.steps())
        self._say(f"undisturbed: {len(undisturbed)} steps of {calm_s:.2f} s")
        plan = self._plan()
        shares, failed, idle = [], 0, 0
        while plan and failed < _FAILED_JOBS:
            job, before = self._job(f"job{len(self._jobs)}"), len(self._events) + len(self._skipped)
            if not self._play(job, plan):
                break
            idle = 0 if len(self._events) + len(self._skipped) > before else idle + 1
            if idle == _IDLE_JOBS:
                kinds = ", ".join(fault.kind for fault in (plan.groups or [plan.starting])[0])
                self._problems.append(f"{job.disk.name}: struck: no moment for {kinds} in {idle} jobs")
                break
            shares.append(goodput(job.steps(), calm_s))
            failed += not self._passes(job, self._judge(job, undisturbed))
            job.family.kill()  # leftovers were reported; they must not affect the next job
            self._shared = _shared_memory()
        print(table(self._events, self._skipped))
        if shares:
            work = sum(shares) / len(shares)
            print(f"goodput {work:.0%} with {len(self._events)} events in {len(shares)} job(s)")
        return self._problems

    def close(self) -> None:
        """Kill all processes of all jobs, even on a second interrupt."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for job in self._jobs:
            job.family.kill()

    @property
    def kinds(self) -> list[str]:
        """Kinds of faults that were selected."""
        return [kind for kind in _kinds() if kind in (self._options.only or _kinds())]

    def _plan(self) -> Plan:
        options = self._options
        if options.short:
            return Plan(short_groups(self._box.refusal, self._rng), [self._rng.choice(start_faults())])
        wanted = self.kinds
        starting = [f for f in start_faults() for _ in range(options.each) if f.kind in wanted]
        groups = [g for g in long_groups(self._box.refusal, wanted) for _ in range(options.each)]
        self._rng.shuffle(groups)
        self._rng.shuffle(starting)
        return Plan(groups, starting)

    def _job(self, name: str) -> Job:
        models = f"[{{name: quality, path: {self._classifier}}}]"
        overrides = [f"steps={self._options.steps}", f"rewards.models={models}", *self._options.overrides]
        log = self._base / f"{name}.log"
        job = Job(self._box.disk / name, self._temporary(), log, overrides, self._nodes)
        self._jobs.append(job)
        return job

    def _temporary(self) -> Path:
        """Return the directory of Ray's sessions."""
        directory = self._base / "ray"
        directory.mkdir(exist_ok=True)
        return directory

    def _play(self, job: Job, plan: Plan) -> bool:
        """Play the plan. Return whether the job finished; otherwise record a problem."""
        play = Play(job, plan, steps=self._options.steps, rng=self._rng, say=self._say)
        try:
            play.run()
        except Stuck as reason:
            self._problems.append(f"{job.disk.name}: finished: {reason}")
            self._say(f"FAILED: {reason}\n{job.output(len(job.begins) - 1)[-3000:]}")
            return False
        finally:
            self._events += play.events
            self._skipped |= play.skipped
        return True

    def _passes(self, job: Job, checks: Mapping[str, str | None]) -> bool:
        """Record broken promises as problems. Return whether there are none."""
        broken = [f"{job.disk.name}: {name}: {problem}" for name, problem in checks.items() if problem]
        self._problems += broken
        return not broken

    def _judge(self, job: Job, undisturbed: verdict.Lines) -> dict[str, str | None]:
        """Check every promise. Return None or the problem, by check."""
        lines = verdict.read_metrics(job.run_dir)
        output = {launch: job.output(launch) for launch in range(len(job.begins))}
        mine = [event for event in self._events if event.at >= job.begins[0]]
        other = verdict.difference(lines, undisturbed)
        lost = verdict.unscored(lines)
        otherwise = bool(lost) or self._in_flight or self._fresher(mine)
        checks = self._check_every_job(job, mine) | {
            "noticed": verdict.unnoticed(mine, self._limits),
            "recovered": verdict.unrecovered(mine, self._events, job.steps()[-1][0], self._limits),
            "named": verdict.silent(mine, output),
            "orphans": verdict.orphans(job.family, self._limits.agents_s),
            "shared memory": self._left_in_memory(),
            "accuracy": verdict.inaccurate(lines, undisturbed),
            # An unscored sample rightly changes the numbers. Timing decides when samples in flight, or a
            # restarted engine, get new weights.
            "same numbers": None if otherwise else other,
        }
        self._say(f"{job.disk.name}: {len(mine)} events, {len(job.begins)} launches")
        unjudged = {"same numbers"} if otherwise else set()
        for name, problem in checks.items():
            print(f"  {name}: {problem or ('not judged' if name in unjudged else 'ok')}")
        if lost:
            print(f"  numbers differ from step {lost[0]} on, which has an unscored sample: {other}")
        return checks

    def _check_every_job(self, job: Job, events: Sequence[Event]) -> dict[str, str | None]:
        """Check the promises that also hold for an undisturbed job."""
        lines, run_dir, steps = verdict.read_metrics(job.run_dir), job.run_dir, self._options.steps
        return {
            "finished": verdict.unfinished(lines, steps),
            "ledger": audit(run_dir / LEDGER, steps=steps, prompts_per_step=_PROMPTS_PER_STEP)
            or verdict.unbalanced(job.output(len(job.begins) - 1)),
            "fresh": verdict.stale(run_dir, steps, self._staleness) or self._mismatched(lines),
            "alive": verdict.hung(job.lines, events, self._limits),
            "survived": verdict.ended([end.code for end in job.ends], events),
        }

    def _mismatched(self, lines: verdict.Lines) -> str | None:
        """Compare log-probs, unless samples may be older than the weights."""
        return None if self._staleness else verdict.mismatched(lines)

    @property
    def _staleness(self) -> int:
        return int(self._override("max_staleness", "0"))

    @property
    def _in_flight(self) -> bool:
        return self._override("weight_sync.mode", "drain") == "keep"

    def _fresher(self, events: Sequence[Event]) -> bool:
        """Return whether a replaced engine may have sampled with newer weights than the lost one."""
        return self._staleness > 0 and any(event.role == "rollout" for event in events)

    def _override(self, key: str, default: str) -> str:
        """Return the value of ``key`` from the command line; `job.yaml` does not set it."""
        overrides = dict(text.split("=", 1) for text in self._options.overrides)
        return overrides.get(key, default)

    def _left_in_memory(self) -> str | None:
        in_use = _mapped_files() if self._box.refusal else ()  # a shared /dev/shm has other jobs' files
        return verdict.left_in_memory(self._shared, _shared_memory(), in_use)

    def _say(self, message: str) -> None:
        print(f"{time.monotonic() - self._begin:6.0f} s  {message}", flush=True)


class ChaosOfNodes(Chaos):
    """The same on a cluster of several nodes, some of which are lost."""

    _name, _settings = "nodes", OVERRIDES
    _faults: Callable[[], list[Fault]] = staticmethod(node_faults)

    @property
    def kinds(self) -> list[str]:
        kinds = [fault.kind for fault in self._faults()] if not self._options.short else []
        return [kind for kind in kinds if kind in (self._options.only or kinds)]

    def run(self) -> list[str]:
        self._nodes = Nodes(self._temporary(), python_path())
        overrides = [*self._settings, *self._options.overrides]
        self._options = argparse.Namespace(**vars(self._options) | {"overrides": overrides})
        self._shared = _shared_memory()
        return super().run()

    def close(self) -> None:
        super().close()
        if self._nodes is not None:
            self._nodes.close()

    def _plan(self) -> Plan:
        faults = [fault for fault in self._faults() if fault.kind in self.kinds]
        groups = [[fault] for fault in faults for _ in range(self._options.each)]
        self._rng.shuffle(groups)
        return Plan(groups, [])

    def _job(self, name: str) -> Job:
        return super()._job(f"{self._name}-{name}")

    def _left_in_memory(self) -> str | None:
        return verdict.left_in_memory(self._shared, _shared_memory(), _mapped_files())  # nodes map files, too


class ChaosOfVisits(ChaosOfNodes):
    """The same with engines that join on added nodes, and leave before these are removed."""

    _name, _settings = "visits", ELASTIC
    _faults: Callable[[], list[Fault]] = staticmethod(visit_faults)


# Faults with distinct symptoms strike together, because recovery takes long.
_AT_ONCE = (
    *(tuple(f"{name} {role}" for role in (*SUPERVISED, "grader")) for name in ("SIGKILL", "SIGSTOP")),
    ("disk full", "torn file"),
)


def long_groups(refusal: str | None, wanted: Collection[str]) -> list[Group]:
    """Return groups with one event of each of the ``wanted`` kinds."""
    torn = TornFile(kills=refusal is not None or "disk full" not in wanted)
    kinds = {fault.kind: fault for fault in [*step_faults(refusal), torn] if fault.kind in wanted}
    at_once = [[kinds.pop(kind) for kind in group if kind in kinds] for group in _AT_ONCE]
    return [*filter(None, at_once), *([fault] for fault in kinds.values())]


def short_groups(refusal: str | None, rng: Random) -> list[Group]:
    """Return groups without rare moments, without signals to the driver during steps, and with one of the two
    signals to a policy rank.

    Each omitted signal would cost a complete restart; the driver gets its signal during a start instead.
    Without a private disk, the torn file's driver is killed during its steps.
    """
    left_out = ("SIGKILL driver", "SIGTERM driver", " at ", rng.choice(["SIGKILL policy", "SIGSTOP policy"]))
    wanted = [kind for kind in _kinds() if not any(part in kind for part in left_out)]
    return long_groups(refusal, wanted)


def _kinds() -> list[str]:
    return [fault.kind for fault in (*step_faults(None), *start_faults())]


def _shared_memory() -> list[str]:
    return [path.name for path in sandbox.SHARED_MEMORY.iterdir()]


def _mapped_files() -> set[str]:
    """Return the names of shared-memory files that any process has mapped."""
    names = set()
    for process in psutil.process_iter():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        names |= {row.rsplit("/", 1)[1] for row in maps.splitlines() if f" {sandbox.SHARED_MEMORY}/" in row}
    return names


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    kinds = [*_kinds(), *(fault.kind for fault in (*node_faults(), *visit_faults()))]
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="one event of most kinds, many at once")
    parser.add_argument("--each", type=int, default=20, help="events of each kind (20)")
    parser.add_argument("--steps", type=int, default=200, help="of each job (200)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, moments and victims")
    parser.add_argument("--only", action="append", choices=kinds, metavar="KIND", help="; ".join(kinds))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"of {CONFIG.name}")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
