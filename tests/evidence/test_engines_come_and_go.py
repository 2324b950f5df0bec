"""Engines join and leave a running job, with the same numbers as a run with one engine. Some minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.loop.ledger import audit
from grpo_dist.observe.tracker import LEDGER
from tests.support.multi_node_elastic import STEPS, command
from tests.support.multi_node_run import lines
from tests.support.real_runs import without_clock

pytestmark = pytest.mark.evidence

ROOT = Path(__file__).resolve().parents[2]
# Metrics that depend on where and when a group was sampled, not on its samples.
PLACES = ("engines/", "restarts/", "rollout/cached", "sync/", "util/", "episode/wait")


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_engines_that_come_and_go_change_no_number_and_lose_no_prompt(tmp_path, placement):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    elastic, fixed = tmp_path / "elastic", tmp_path / "fixed"
    for directory in (elastic, fixed):
        directory.mkdir()
    arguments = [sys.executable, "-m", "tests.support.multi_node_elastic", str(elastic), placement]
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=3 * 3600)
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-3000:] + (elastic / "output.txt").read_text()[-5000:]
    plain_run = command(fixed, "cluster.placement=separate", "rollout.num_workers=1")
    subprocess.run(plain_run, env=environment, check=True, timeout=3 * 3600)
    changed, plain = lines(elastic / "run"), lines(fixed / "run")
    assert audit(elastic / "run" / LEDGER, steps=STEPS, prompts_per_step=4) is None
    assert sum(line["engines/joined"] for line in changed) == 3
    assert sum(line["engines/left"] for line in changed) == 3
    assert sum(line["restarts/rollout"] for line in changed) == 0
    for name in ("join_s", "leave_s"):
        print(name, [line[f"engines/{name}"] for line in changed if line[f"engines/{name}"]])
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.startswith(PLACES)} for line in without_clock(run_lines)]
        for run_lines in (changed, plain)
    )
    assert ours == theirs
