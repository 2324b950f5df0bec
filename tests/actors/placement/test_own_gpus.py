"""A worker that would compute on GPUs that Ray did not assign refuses to start, and names the variable."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from actors import connection
from actors.placement import own_gpus
from actors.placement.own_gpus import EMPTIED, NOT_SET, SHARED, VISIBLE, check_gpus
from actors.workers.policy import PolicyWorker
from actors.workers.reference import ReferenceWorker
from actors.workers.reward import RewardModelWorker
from actors.workers.rollout import RolloutWorker
from grpo_dist.config import ModelConfig
from grpo_dist.config.rewards import OutcomeModelConfig
from grpo_dist.errors import UserError, as_user_errors
from tests.support.patience import HANG_S


@pytest.fixture
def actor(monkeypatch):
    """Make this process an actor on a node with four GPUs, with ``assigned`` GPUs and an environment."""

    def make(assigned=(), **environment):
        for name in (VISIBLE, SHARED, NOT_SET, EMPTIED):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": list(assigned)})
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
        monkeypatch.setattr(own_gpus, "usable_gpus", lambda: 4)

    return make


@pytest.mark.parametrize(
    ("assigned", "environment"),
    [
        ((), {}),
        ((), {VISIBLE: "2,3"}),  # for a worker without GPUs
        (("1",), {VISIBLE: "1"}),
        (("3", "1"), {VISIBLE: "1,3"}),
        (("GPU-a",), {VISIBLE: "GPU-a"}),
        (("0", "1", "2", "3"), {NOT_SET: "1"}),  # the whole node: it sees what it has
        ((), {VISIBLE: "0,1", SHARED: "0,1"}),
        ((), {VISIBLE: "0,1", SHARED: "0,1", NOT_SET: "1", EMPTIED: "1"}),
    ],
)
def test_a_worker_that_sees_its_own_gpus_starts(actor, assigned, environment):
    actor(assigned, **environment)
    check_gpus()


@pytest.mark.parametrize(
    ("assigned", "environment", "words"),
    [
        (("2",), {NOT_SET: "1"}, rf"GPU 2 of 10\.0\.0\.1, .*is not set.*{NOT_SET}=1 has Ray leave it alone"),
        (("2",), {NOT_SET: "true", VISIBLE: "0,1"}, rf"is '0,1'.*{NOT_SET}=true has Ray leave it"),
        ((), {SHARED: "0,1", VISIBLE: "", EMPTIED: "1"}, rf"GPU 0, 1 .* is ''.*{EMPTIED}=1 has Ray empty it"),
        (("2",), {VISIBLE: "0"}, "something other than Ray has set it"),
        ((), {SHARED: "0,1", VISIBLE: "0", EMPTIED: "0"}, "something other than Ray has set it"),
    ],
)  # fmt: skip
def test_a_worker_that_sees_others_names_the_variable_and_the_remedy(actor, assigned, environment, words):
    actor(assigned, **environment)
    with pytest.raises(UserError, match=words) as refused:
        check_gpus()
    assert "restart Ray" in str(refused.value) and "\n" not in str(refused.value)


def start_of(kind):
    """Return the call that loads the model of a worker; the model does not exist."""
    model = ModelConfig(path="none", dtype="auto")
    if kind == "rank":
        return lambda: PolicyWorker().start(None, None, model, "none", None)
    if kind == "engine":
        return lambda: asyncio.run(RolloutWorker.__new__(RolloutWorker).start())
    if kind == "reference":
        return ReferenceWorker(model=model, model_dir="none", temperature=1.0).ready
    return RewardModelWorker(OutcomeModelConfig(name="m", path="none"), policy=model, policy_dir="none").ready


@pytest.mark.parametrize("kind", ["rank", "engine", "reference", "reward model"])
def test_every_worker_with_gpus_compares_before_it_loads_anything(actor, kind, monkeypatch):
    actor(("2",), **{NOT_SET: "1"})
    started = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: started.append(True))
    with pytest.raises(UserError, match=NOT_SET):
        start_of(kind)()
    assert not started


def test_a_private_ray_starts_without_the_variables(monkeypatch):
    variables = []
    monkeypatch.setenv(NOT_SET, "1")
    monkeypatch.setenv(EMPTIED, "1")
    monkeypatch.setattr(ray, "init", lambda **_: variables.append({NOT_SET, EMPTIED} & set(os.environ)))
    connection.start_private_ray(include_dashboard=False)
    assert variables == [set()]


def test_a_refusal_of_an_actor_reaches_the_user_without_a_traceback():
    class FromRay(UserError):
        """As Ray raises it: the message is the remote traceback."""

        cause = UserError("the message")

    with pytest.raises(UserError) as refused, as_user_errors():
        raise FromRay("Traceback (most recent call last):\n  ...")
    assert str(refused.value) == "the message"


_ON_TWO_GPUS = """
import json, os, ray
from actors.factory import set_devices
from actors.placement.own_gpus import check_gpus
from actors.workers.policy import PolicyWorker, devices_of
from grpo_dist.errors import UserError, as_user_errors

def refusal(actor):
    try:
        with as_user_errors():
            ray.get(actor.__ray_call__.remote(lambda _: check_gpus()))
    except UserError as error:
        return str(error)

ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
worker, found = ray.remote(PolicyWorker), {}
for name in ("", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {name: "1"} if name else {"A": "1"}}}
    rank = worker.options(num_gpus=1, **options).remote()
    devices = ray.get(rank.__ray_call__.remote(devices_of))
    engine = worker.options(**options | {"num_gpus": 0} | set_devices(options, devices)).remote()
    found[name] = refusal(rank), refusal(engine)
    ray.kill(rank)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_what_ray_does_with_the_variables_is_refused_and_nothing_else():
    """On a Ray with two GPUs that do not exist."""
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    command = [sys.executable, "-c", _ON_TWO_GPUS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S, check=True)
    refusals = json.loads(run.stdout)
    assert refusals[""] == [None, None]
    rank, engine = refusals[NOT_SET]
    assert f"{NOT_SET}=1 has Ray leave it alone" in rank and engine is None
    rank, engine = refusals[EMPTIED]
    assert rank is None and f"{EMPTIED}=1 has Ray empty it" in engine
