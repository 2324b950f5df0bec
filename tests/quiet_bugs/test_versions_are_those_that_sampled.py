"""prime-rl#3050, "hold batch ship on the trainer's published version": the review found that the version
advanced when the weights were published, before the engines had paused. Groups started in between had the
new version while the engine still served the old weights, so staleness was understated.

Here a token's version is the engine's label at the engine step that produced it, and the label changes
between pause and resume, after the last weight has arrived.
"""

import asyncio
from types import SimpleNamespace

import pytest

from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutWorker, _generation
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.loop.metrics import rollout_metrics
from tests.support.made_groups import group_of

OLD, NEW = 4, 5


def noted(method):
    """Log the call of an asynchronous ``method``, then run it."""

    async def call(engine, *arguments, **keywords):
        engine.log.append(method.__name__)
        return method(engine, *arguments, **keywords)

    return call


class Engine:
    """Labels tokens while it is not paused. ``log``: calls in order."""

    def __init__(self):
        self.label, self.weights, self.paused, self.log = OLD, OLD, False, []

    @noted
    def pause(self, *, drain):
        self.paused = True

    @noted
    def start_weight_update(self): ...

    @noted
    def update_weights(self, info):
        assert self.paused, "weights are replaced under running requests"
        self.weights = NEW

    @noted
    def finish_weight_update(self): ...

    @noted
    def set_weight_version(self, version):
        assert self.paused, "the label changes under running requests"
        self.label = version
        return version

    @noted
    def resume(self):
        self.paused = False

    def token(self):
        """Return the label and the weights version of a token; None while paused."""
        return None if self.paused else (self.label, self.weights)


def test_the_bug_labels_tokens_of_old_weights_with_the_new_version():
    engine, tokens = Engine(), []

    async def update():
        await engine.pause(drain=False)
        await engine.update_weights({})
        await engine.resume()

    tokens.append((NEW, engine.weights))  # published, and a group begins before the pause
    asyncio.run(update())
    assert tokens == [(NEW, OLD)]


def test_an_engine_labels_every_token_with_the_weights_that_made_it():
    spec = EngineSpec(RolloutConfig(), WeightSyncConfig(mode="keep"), ModelConfig(path="m"), "m", 256, seed=0)
    worker, engine, tokens = RolloutWorker(spec), Engine(), []
    worker._engine = engine

    async def update():
        tokens.append(engine.token())
        assert await worker.begin_update()
        tokens.append(engine.token())
        await worker.receive_weights([], 1, None)
        tokens.append(engine.token())
        assert await worker.finish_update(NEW) == NEW
        tokens.append(engine.token())

    asyncio.run(update())
    assert engine.log == [
        "pause", "start_weight_update", "update_weights",
        "finish_weight_update", "set_weight_version", "resume",
    ]  # fmt: skip
    assert tokens == [(OLD, OLD), None, None, (NEW, NEW)]


def test_a_sample_that_spans_an_update_has_both_versions():
    spans = [SimpleNamespace(start=0, end=2, version="4"), SimpleNamespace(start=2, end=5, version="5")]
    logprobs = SimpleNamespace(logprobs=[-0.5] * 5, start_indices=list(range(5)))
    output = SimpleNamespace(
        finish_reason="stop", logprobs=logprobs, token_ids=[7] * 5, weight_versions=spans, routed_experts=None
    )
    generation = _generation(SimpleNamespace(outputs=[output], num_cached_tokens=0))
    assert generation.versions.tolist() == [4, 4, 5, 5, 5]


def test_the_staleness_of_a_step_is_counted_from_its_tokens():
    """Not from the version at which a sample began or ended: 4, 4 and 5 are 3, 3 and 2 behind version 7."""
    group = group_of([1.0], [3])
    group.rollouts[0].policy_versions[:] = [4, 4, 5]
    metrics = rollout_metrics([group], version=7)
    assert metrics["rollout/staleness_max"] == 3
    assert metrics["rollout/staleness_mean"] == pytest.approx(8 / 3)
