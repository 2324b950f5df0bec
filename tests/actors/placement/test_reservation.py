"""A run in a cluster of several nodes: its reservation next to another job and the nodes of its roles, an
autoscaler, and an object store that is too small (`tests/support/several_nodes.py`).
"""

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine

ROOT = Path(__file__).resolve().parents[3]


def on_nodes(scenario, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "tests.support.several_nodes", scenario]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run


@pytest.mark.slow
def test_a_reservation_is_waited_for_survives_a_lost_node_and_is_released():
    run = on_nodes("reservations")
    lines = run.stdout.splitlines()
    begin = lines.index(
        "cluster: no room for this run within `cluster.timeouts.placement_timeout_s` = 1 s; it asks for"
    )
    refusal = lines[begin : lines.index("placed")]
    assert refusal[1:5] == [
        "  policy: 2 x 1 GPU(s) and 1 CPU(s)",
        "  rollout: 1 x 2 GPU(s) and 1 CPU(s)",
        "  rewards: 1 x 1 CPU(s)",
        "and has",
    ]
    assert sum(": 1 of 2 GPU(s) and 4 of 4 CPU(s) free" in line for line in refusal) == 1
    assert refusal[-1].startswith("Lower `policy.num_workers`, wait")
    assert lines[lines.index("placed") :] == [
        "placed",
        "replaced",
        "given back",
        "a worker of `rollout` takes 4 GPU(s) of one node, and none has as much:",
    ]
    assert re.search(r"waiting for room in the cluster \(\d+ of 60 s\): ", run.stderr)
    assert "of 1 s): " not in run.stderr  # a short wait is not logged


@pytest.mark.slow
def test_nodes_that_an_autoscaler_adds_are_counted_and_waited_for():
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    run = on_nodes("growth", **token)
    lines = run.stdout.splitlines()
    assert lines[0].endswith("or set `cluster.grows_to` where an autoscaler adds them")
    assert lines[1:] == ["grown to 2 nodes"]
    assert re.search(r"waiting for room in the cluster \(\d+ of 180 s\): ", run.stderr)


@pytest.mark.slow
def test_batches_beyond_the_object_store_are_spilled_and_reach_their_rank_intact():
    run = on_nodes("spilling")
    assert re.search(r"spilled \d+ MiB, [1-9]\d* objects", run.stdout), run.stdout[-3000:]


@pytest.mark.slow
def test_reward_models_with_shares_are_on_one_gpu_and_a_split_one_has_its_own():
    assert "shared" in on_nodes("shared_gpu").stdout


@pytest.mark.slow
def test_policy_and_engines_have_whole_nodes_though_ray_mixes_their_bundles():
    lines = on_nodes("assignment").stdout.splitlines()
    # Ray may print the last log lines of the lost node.
    ours = [line for line in lines if line.startswith("whole nodes")]
    assert ours == ["whole nodes", "whole nodes again"], lines
