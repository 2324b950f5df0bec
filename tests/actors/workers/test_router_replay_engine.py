"""Router replay with a real engine and a real rank: both compute the same model, also where experts are
almost tied and rounding decides between them.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError

from actors.workers import rollout as rollout_module
from actors.workers.engine_settings import RECORDING_WORKER, EngineSpec, engine_arguments
from actors.workers.rollout import RolloutWorker, stored
from grpo_dist.config import (
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from grpo_dist.environments.episode import Generation
from grpo_dist.errors import SamplesLost, UserError
from grpo_dist.types import FurtherRow, HeldRoutes, Sampling
from tests.support.made_groups import group_of
from tests.support.models import tied_model
from tests.support.real_engine import LONG_PROMPTS, SAME, World, batch_of, mismatch
from tests.support.real_ranks import OpenWorker

pytestmark = [pytest.mark.machine, pytest.mark.slow]


def test_replayed_routes_make_engine_and_trainer_the_same_model(ray_cluster, tmp_path):
    """With a compiled engine, cached prompts, and after an update with its sync. Without replay the mismatch
    metrics show that both choose different experts.
    """
    settings = PolicyConfig(
        zero_stage=2, router_replay=True, optimizer=OptimizerConfig(lr=3e-3, schedule="constant")
    )
    world = World(tied_model(tmp_path, "qwen3_moe"), settings, OpenWorker)
    try:
        sampled = world.sample_all(LONG_PROMPTS)
        assert max(world.cached()) >= 32
        batch = batch_of(sampled)
        assert np.all(np.less(mismatch(world, batch), SAME))
        mean, largest = mismatch(world, replace(batch, routes=None))
        assert mean > 0.1
        assert largest > 1
        metrics = world.run(world.policy.update(world.policy.stage([batch])))
        assert metrics["mismatch/logprob_diff_max"] < SAME[1]
        world.push()
        again = world.sample_all(LONG_PROMPTS)
        assert np.all(np.less(mismatch(world, batch_of(again)), SAME))
        before, after = (s[0][0].routes.fetch()[:40] for s in (sampled, again))  # the same prompt
        assert np.mean(before != after) > 0.1
    finally:
        world.close()


def test_routes_are_read_from_the_blocks_of_a_request():
    """A token that is not cached is not recorded, and a later one replaces what was in its slot."""
    from actors.workers.recorders import RecordedRoutes, RouteRecorder

    recorder = RouteRecorder(slots=12, block_size=4, layers=2, experts=300, per_token=1)
    recorder.record(1, np.array([8, 9, 10, 11, 4, -1]), np.array([[1], [2], [3], [4], [299], [7]]))
    recorder.record(1, np.array([9]), np.array([[5]]))
    assert recorder.routes([2, 1], 0, 5)[:, 1, 0].tolist() == [1, 5, 3, 4, 299]
    assert recorder.routes([2, 1], 3, 5)[:, 0, 0].tolist() == [0, 0]
    blocks = SimpleNamespace(get_block_ids=lambda _: ([2, 1],))
    routes = RecordedRoutes(SimpleNamespace(kv_cache_manager=blocks), recorder)
    request = SimpleNamespace(request_id="r", num_tokens=4, is_finished=lambda: False)
    assert routes.take_output(request, None)[:, 1, 0].tolist() == [1, 5, 3]
    routes.request_finished(request)  # preempted: routes are not returned twice
    assert routes.take_output(request, None) is None
    request.num_tokens = 6
    assert routes.take_output(request, None)[:, 1, 0].tolist() == [4, 299]
    request.is_finished = lambda: True
    routes.request_finished(request)
    assert routes._taken == {}


def test_which_engines_record_routes():
    """vLLM's recorder on GPUs, ours elsewhere; dense models and other processes are refused."""

    def arguments(kind="qwen3_moe", device="cpu", **rollout):
        model = SimpleNamespace(
            model_type=kind, num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4, head_dim=32,
            num_experts=4 if kind != "qwen2" else None,
        )  # fmt: skip
        model.get_text_config = lambda: model
        sections = RolloutConfig(**rollout), WeightSyncConfig(), ModelConfig(path="m")
        spec = EngineSpec(*sections, "m", 64, 0, router_replay=True)
        made = engine_arguments(spec, model, device=device, free_memory=2**30)
        return made.get("worker_cls"), made.get("enable_return_routed_experts")

    assert arguments() == (RECORDING_WORKER, None)
    assert arguments(device="cuda", tensor_parallel_size=2) == (None, True)
    with pytest.raises(UserError, match=r"policy\.router_replay: qwen2 has no experts"):
        arguments("qwen2")
    with pytest.raises(UserError, match="deepseek_v3 has a router that it does not know"):
        arguments("deepseek_v3")
    with pytest.raises(UserError, match=r"`rollout\.tensor_parallel_size` = 2"):
        arguments(tensor_parallel_size=2)


def test_an_evaluation_engine_records_routes_and_keeps_only_the_routes_of_the_probe(monkeypatch):
    """The policy replays the probe's routes; routes of evaluation samples would fill the object store."""
    values, versions = np.zeros(2, np.float32), np.zeros(2, np.int32)
    routes = HeldRoutes(np.zeros((41, 2, 1), np.uint8))

    async def generate(ids, seed, *rest, **more):
        return Generation([seed, 2], values, versions, "stop", 0, routes)

    def routes_of(spec):
        worker = RolloutWorker(spec)
        worker._tokenizer, worker._generate = SimpleNamespace(decode=lambda ids, **_: "text"), generate
        request = LONG_PROMPTS[0], [7], Sampling()
        (probed,), (sampled,) = asyncio.run(worker.probe(*request)), asyncio.run(worker.sample(*request))
        return probed.routes, sampled.routes

    monkeypatch.setattr(rollout_module, "stored", lambda sample: sample)
    sections = RolloutConfig(), WeightSyncConfig(), ModelConfig(path="m")
    spec = EngineSpec(*sections, "m", 64, 0, router_replay=True)
    assert spec.make_evaluation_spec(EvaluationConfig(num_workers=1)).router_replay
    assert routes_of(spec) == (routes, routes)
    assert routes_of(spec.make_evaluation_spec(EvaluationConfig(num_workers=1))) == (routes, None)


def test_a_sample_without_routes_has_them_in_no_row():
    rollout, routes = group_of([1.0], [2]).rollouts[0], HeldRoutes(np.zeros((3, 2, 1), np.uint8))
    ids = np.zeros(2, np.int32)
    row = FurtherRow(ids, ids, ids.astype(np.float32), ids, routes=routes)
    bare = replace(rollout, routes=routes, further_rows=(row,)).without_routes()
    assert [row.routes for row in bare.rows] == [None, None]


def test_routes_that_are_lost_are_an_error_that_sends_the_run_to_its_checkpoint(ray_cluster, monkeypatch):
    """SamplesLost, on a rank and on the driver: see `Cluster.failures_as_state_lost`."""
    routes = HeldRoutes(np.arange(6, dtype=np.uint8).reshape(3, 2, 1))
    rollout = replace(group_of([1.0], [2]).rollouts[0], routes=routes)
    handle = stored(rollout).routes
    assert handle.fetch().shape == (3, 2, 1)
    assert handle.digest(2) == rollout.routes.digest(2) == handle.digests[2]  # 3 + 1 - 2 tokens
    assert handle.digest(1) == rollout.routes.digest(1) != handle.digest(2)

    def no_answer(reference, *, timeout):
        raise GetTimeoutError(f"not within {timeout:g} s")

    monkeypatch.setattr(ray, "get", no_answer)
    assert handle.digest(2) and handle.digest(0) == b""  # planning fetches nothing
    with pytest.raises(SamplesLost, match="the routes of a sample are lost: not within 120 s"):
        handle.fetch()
