"""Prompts of several sources by weight."""

from collections import Counter
from dataclasses import replace

import pytest

from grpo_dist.config import DataConfig
from grpo_dist.data.mixture import Mixture, check_weights
from grpo_dist.data.order import OrderState
from grpo_dist.data.stream import PromptStream
from grpo_dist.loop.admission import Drawn
from grpo_dist.loop.pipeline import order_of
from tests.support import fakes

SOURCES = ["math"] * 30 + ["code"] * 10 + ["chat"] * 60
WEIGHTS = {"math": 3.0, "code": 1.0, "chat": 4.0}
PROMPTS = [replace(p, source=s) for p, s in zip(fakes.prompts(100), SOURCES, strict=True)]


def test_every_stretch_of_draws_has_the_shares_of_the_weights():
    mixture = Mixture(SOURCES, WEIGHTS, seed=0)
    drawn = [SOURCES[mixture.prompt(i)] for i in range(10_000)]
    for begin, size in [(0, 40), (137, 80), (4000, 400), (0, 10_000)]:
        counts = Counter(drawn[begin : begin + size])
        for name, weight in WEIGHTS.items():
            assert abs(counts[name] - size * weight / 8) < 4


def test_each_source_is_drawn_in_epochs_of_its_own():
    mixture = Mixture(SOURCES, WEIGHTS, seed=0)
    drawn = [mixture.prompt(i) for i in range(2000)]
    for name in WEIGHTS:
        members = [i for i, source in enumerate(SOURCES) if source == name]
        own = [i for i in drawn if SOURCES[i] == name]
        assert len(own) >= 2 * len(members)
        for epoch in range(len(own) // len(members)):
            part = own[epoch * len(members) : (epoch + 1) * len(members)]
            assert sorted(part) == members
        assert own[: len(members)] != own[len(members) : 2 * len(members)]
    again = Mixture(SOURCES, WEIGHTS, seed=0)
    assert [again.prompt(i) for i in reversed(range(2000))] == drawn[::-1]
    assert [Mixture(SOURCES, WEIGHTS, seed=1).prompt(i) for i in range(50)] != drawn[:50]


def test_batches_have_no_prompt_twice_keep_the_shares_and_resume_the_same():
    stream = PromptStream(PROMPTS, 16, seed=0, state=OrderState(), weights=WEIGHTS)
    batches, states = [], []
    for batch in range(60):
        batches.append([stream.prompt(index) for index in stream.take(batch)])
        states.append(stream.state)
    assert all(len(set(own)) == 16 for own in batches)
    counts = Counter(SOURCES[i] for own in batches for i in own)
    assert all(abs(counts[name] - 960 * weight / 8) < 8 for name, weight in WEIGHTS.items())
    resumed = PromptStream(PROMPTS, 16, seed=0, state=states[29], weights=WEIGHTS)
    assert [[resumed.prompt(i) for i in resumed.take(b)] for b in range(30, 60)] == batches[30:]
    assert sum(stream.sampled().values()) == 960


def test_the_configuration_gives_the_stream_its_weights():
    train = [{"path": f"{name}.jsonl", "weight": weight} for name, weight in WEIGHTS.items()]
    config = fakes.config(data={"train": train}, batch={"prompts_per_step": 8, "samples_per_prompt": 2})
    assert config.data.weights == {"math": 3 / 8, "code": 1 / 8, "chat": 4 / 8}
    order = order_of(config, PROMPTS, OrderState())
    counts = Counter(SOURCES[order.prompt(index)] for batch in range(20) for index in order.take(batch))
    assert counts["math"] == pytest.approx(60, abs=3) and counts["code"] == pytest.approx(20, abs=3)


def test_a_source_that_is_too_small_for_its_weight_is_refused():
    data = DataConfig.model_validate(
        {"train": [{"path": "code.jsonl", "weight": 1}, {"path": "chat.jsonl", "weight": 1}]}
    )
    check_weights(data, PROMPTS, in_flight=20)
    with pytest.raises(ValueError, match=r"source code has 10 prompts.*50% of the 24.*lower its weight"):
        check_weights(data, PROMPTS, in_flight=24)


@pytest.mark.parametrize(("order", "in_flight"), [("launched", 32), ("finished", 30)])
def test_a_weight_counts_the_prompts_that_dynamic_sampling_may_draw(order, in_flight):
    """Four a step and one step ahead are 8 on their way, of which 4 prompts give a half; with those that
    replace groups without a signal they are not.
    """
    train = [{"path": f"{name}.jsonl", "weight": 1.0} for name in ("code", "chat")]
    prompts = [replace(p, source="code" if i < 4 else "chat") for i, p in enumerate(fakes.prompts(64))]
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "order": order}
    for dynamic in (False, True):
        config = fakes.config(
            data={"train": train}, batch=batch, max_staleness=1, dynamic_sampling={"enabled": dynamic}
        )
        drawn = Drawn.of(config.batch, config.dynamic_sampling, max_staleness=1, prompts=64)
        if dynamic:
            assert drawn.in_flight == in_flight
            with pytest.raises(ValueError, match=rf"code has 4 prompts.*{in_flight}.*max_extra_prompts"):
                check_weights(config.data, prompts, in_flight=drawn.in_flight)
        else:
            check_weights(config.data, prompts, in_flight=drawn.in_flight)
