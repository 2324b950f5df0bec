"""Prompts of several sources by weight."""

from collections import Counter
from dataclasses import replace

import pytest

from grpo_dist.config import DataConfig
from grpo_dist.data.order import OrderState
from grpo_dist.data.stream import Mixture, PromptStream, check_weights, most_at_once
from grpo_dist.loop.admission import Admission
from grpo_dist.loop.pipeline import build_order
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
    order = build_order(config, PROMPTS, OrderState())
    counts = Counter(SOURCES[order.prompt(index)] for batch in range(20) for index in order.take(batch))
    assert counts["math"] == pytest.approx(60, abs=3) and counts["code"] == pytest.approx(20, abs=3)


def test_a_source_that_is_too_small_for_its_weight_is_refused():
    data = DataConfig.model_validate(
        {"train": [{"path": "code.jsonl", "weight": 1}, {"path": "chat.jsonl", "weight": 1}]}
    )
    check_weights(data, PROMPTS, in_flight=20)
    with pytest.raises(ValueError, match=r"source code has 10 prompts.*50% of the 24.*lower its weight"):
        check_weights(data, PROMPTS, in_flight=24)


@pytest.mark.parametrize("extra", [None, 400])
@pytest.mark.parametrize(
    ("order", "weights", "counts", "own", "staleness", "most"),
    [
        ("launched", (1, 1), (4000, 600), 256, 1, 1200),
        ("launched", (1, 1), (400, 600), 128, 1, 800),
        ("launched", (1, 1), (40, 60), 32, 0, 80),
        ("launched", (7, 93), (7, 93), 32, 0, 100),
        ("launched", (1, 1), (4, 60), 4, 1, 8),
        ("completion", (1, 1), (4000, 600), 256, 1, 1200),
        ("completion", (7, 93), (7, 93), 32, 1, 100),
        ("completion", (1, 1), (4, 60), 4, 1, 8),
    ],
)
def test_dynamic_sampling_replaces_as_many_groups_as_the_sources_allow(
    order, weights, counts, own, staleness, most, extra
):
    """The steps' own prompts fit, so the mixture trains; those that replace groups fill what is left."""
    sources = ["code"] * counts[0] + ["chat"] * counts[1]
    prompts = [replace(p, source=s) for p, s in zip(fakes.prompts(sum(counts)), sources, strict=True)]
    train = [{"path": f"{s}.jsonl", "weight": w} for s, w in zip(("code", "chat"), weights, strict=True)]
    config = fakes.config(
        data={"train": train},
        batch={"prompts_per_step": own, "samples_per_prompt": 2, "order": order},
        max_staleness=staleness,
        dynamic_sampling={"enabled": True, "max_extra_prompts": extra},
    )
    assert most_at_once(config.data.weights, prompts) == most
    admission = Admission.from_config(config, prompts)
    assert own <= admission.per_draw <= admission.drawn <= most
    if order == "launched" and extra is None:
        assert admission.per_draw == min(4 * own, most // (1 + staleness))
    check_weights(config.data, prompts, in_flight=admission.drawn)
    taken = build_order(config, prompts, OrderState()).take(0)
    assert len(taken) == (admission.per_draw if order == "launched" else 1)


@pytest.mark.parametrize(("order", "in_flight"), [("launched", 16), ("completion", 8)])
def test_a_source_that_is_too_small_for_the_steps_own_prompts_is_refused(order, in_flight):
    config = fakes.config(
        data={"train": [{"path": f"{name}.jsonl", "weight": 1.0} for name in ("code", "chat")]},
        batch={"prompts_per_step": 8, "samples_per_prompt": 2, "order": order},
        max_staleness=1,
        dynamic_sampling={"enabled": True},
    )
    prompts = [replace(p, source="code" if i < 3 else "chat") for i, p in enumerate(fakes.prompts(64))]
    assert most_at_once(config.data.weights, prompts) == 6
    assert Admission.from_config(config, prompts).drawn == in_flight
    with pytest.raises(ValueError, match=rf"code has 3 prompts.*50% of the {in_flight}"):
        check_weights(config.data, prompts, in_flight=in_flight)


def test_all_prompts_can_be_drawn_at_once_without_weights():
    assert most_at_once({}, PROMPTS) == 100
