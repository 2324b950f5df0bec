"""A run on several nodes loses two of them; the cluster's other tenant notices nothing. Some minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.loop.ledger import audit
from grpo_dist.observe.tracker import LEDGER
from tests.support.multi_node_run import STEPS, lines

pytestmark = pytest.mark.evidence

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(4 * 3600)
def test_a_run_survives_lost_nodes_and_does_not_disturb_other_jobs(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.multi_node_run", str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3 * 3600)
    output = (tmp_path / "output.txt").read_text()
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-3000:] + output[-5000:]
    steps = lines(tmp_path / "run")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert audit(tmp_path / "run" / LEDGER, steps=STEPS, prompts_per_step=4) is None
    assert sum(line["restarts/rollout"] for line in steps) >= 1
    assert sum(line["restarts/policy"] for line in steps) >= 1
