"""`grpo-dist train` as a process, on real parts and a model with random weights."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.patience import HANG_S, wait_for_end

# Settings of every run: a model with random weights and little memory.
TINY = """
name: run
model: {path: "demo:tiny"}
batch: {prompts_per_step: 4, samples_per_prompt: 4, micro_batch_tokens: 256}
sampling: {max_new_tokens: 16}
# Random weights never answer right: the reward counts digits, so that advantages are not all zero.
rewards:
  functions: [{function: math}, {name: digits, function: "end_to_end_rewards:digit_share"}]
code_paths: [REWARDS]
rollout: {kv_cache_gib: 0.25, enforce_eager: true}
""".replace("REWARDS", str(Path(__file__).parent))
BASE = (
    TINY
    + """
data:
  train: [{path: "demo:add3"}]
  eval: [{path: "demo:add3", split: test, max_rows: 8}]
  max_prompt_tokens: 32
policy: {num_workers: 2, zero_stage: 2, optimizer: {lr: 1.0e-3, schedule: linear, warmup_steps: 2}}
evaluation: {after: false, samples_per_prompt: 2, k: [1, 2]}
checkpoint: {export: false, every: 3}
algorithm: {kl: {coef: 0.05}}
"""
)

KILLED: list[str] = []  # marks of killed runs whose processes are not yet searched for
CLOCK = ("time/", "throughput/", "memory/", "rollout/acceptance_length")


def run(directory, *overrides, check=True, kill_after=None, number=signal.SIGKILL, lose=None):
    """Run `grpo-dist train` in ``directory`` to its end. With ``kill_after``, send it the signal ``number``
    once that checkpoint or a later one exists; with ``lose``, instead kill all its actors of that class, and
    the run continues. Fails if a process of the run outlives it.
    """
    path = directory / "config.yaml"
    path.write_text(BASE)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "grpo_dist.cli", "train", str(path), *overrides]
    environment = os.environ | {"GRPO_DIST_TEST_RUN": mark}
    out, err, lost = directory / "out", directory / "err", 0
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(command, cwd=directory, stdout=stdout, stderr=stderr, env=environment)
        while kill_after and not has_checkpoint(directory / "runs/run", kill_after):
            assert process.poll() is None, err.read_text()[-5000:]
            time.sleep(0.1)
        if lose:
            lost = kill_actors(lose, mark)
        elif kill_after:
            process.send_signal(number)
        wait_for_end(process, lambda: [path.stat().st_size for path in (out, err)])
    done = subprocess.CompletedProcess(command, process.returncode, out.read_text(), err.read_text())
    assert lost or not lose, f"no {lose} ran"
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    if kill_after and not lose and number == signal.SIGKILL:
        # Ray's agents outlive their raylet for a while: the next run checks at its end that they are gone.
        KILLED.append(mark)
        return done
    assert not survivors(mark, seconds=HANG_S)
    while KILLED:
        assert not survivors(KILLED.pop(), seconds=HANG_S)
    return done


def kill_actors(name, mark):
    """Kill all actors of class ``name`` of a run; return how many."""
    processes = [p for p in psutil.process_iter() if belongs(p, mark) and _is_actor(p, name)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return len(processes)


def _is_actor(process, name):
    try:
        return f"ray::{name}" in "".join(process.cmdline())
    except psutil.Error:
        return False


def has_checkpoint(run, name):
    """Return whether ``run`` has checkpoint ``name``, or a later one, which may have replaced it."""
    return any(path.name >= name for path in run.glob("checkpoints/step_" + 6 * "[0-9]"))


def survivors(mark, seconds):
    """Return the processes of a run that remain this long after its end."""
    _, alive = psutil.wait_procs([p for p in psutil.process_iter() if belongs(p, mark)], timeout=seconds)
    return [p.cmdline() for p in alive if belongs(p, mark)]


def belongs(process, mark):
    try:
        return (
            process.status() != psutil.STATUS_ZOMBIE and process.environ().get("GRPO_DIST_TEST_RUN") == mark
        )
    except psutil.Error:
        return False


def metrics(directory, name="run"):
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_clock(lines):
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines]
