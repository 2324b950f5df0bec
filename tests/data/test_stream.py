"""Orders of prompts under dynamic sampling: streams, mixtures of sources, curricula."""

import random
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.config import DataConfig
from grpo_dist.data.order import Curriculum, OrderState, shuffled, step_prompts
from grpo_dist.data.stream import Mixture, PromptStream, check_weights, most_at_once
from grpo_dist.loop.pipeline import Admission, build_order
from tests.support import fakes
from tests.support.made_groups import group, group_of


def make_stream(n, per_batch, *, seed=0, state=None):
    return PromptStream(fakes.prompts(n), per_batch, seed=seed, state=state or OrderState())


def groups_of(prompts):
    """Return groups of these prompts."""
    return [group(i, np.random.default_rng(0), samples=2) for i in prompts]


def test_returned_prompts_come_first_in_the_next_batch():
    order = [int(i) for i in shuffled(9, 0, 0)]
    stream = make_stream(9, 4)
    first = stream.take(0)
    assert first == [0, 1, 2, 3] and [stream.prompt(place) for place in first] == order[:4]
    stream.trained(first, groups_of(order[:2]))
    assert stream.state == OrderState(4, (2, 3))
    assert stream.take(1) == [2, 3, 4, 5]


def test_prompts_returned_by_a_batch_in_flight_queue_behind_older_ones():
    stream = make_stream(40, 4)
    first, second = stream.take(0), stream.take(1)
    stream.trained(second, groups_of([stream.prompt(4)]))
    stream.trained(first, groups_of(stream.prompt(place) for place in (0, 2)))
    assert stream.state == OrderState(8, (1, 3, 5, 6, 7))


def test_no_prompt_is_in_a_batch_twice_and_the_postponed_one_waits():
    """Batches of three from four prompts: the second takes the last of epoch 0 and two others of epoch 1."""
    stream = make_stream(4, 3)
    stream.trained(stream.take(0), groups_of(range(4)))
    again = stream.take(1)
    assert again[0] == 3 and len({stream.prompt(place) for place in again}) == 3
    passed_over = [place for place in range(stream.state.position) if place > 3 and place not in again]
    assert all(stream.prompt(place) == stream.prompt(3) for place in passed_over)
    assert stream.state.waiting == tuple(passed_over)


def test_without_returned_prompts_it_is_the_plain_order():
    stream = make_stream(10, 4, seed=5)
    for step in range(30):
        places = stream.take(step)
        prompts = [stream.prompt(place) for place in places]
        assert sorted(prompts) == sorted(step_prompts(10, 4, 5, step))
        stream.trained(places, groups_of(prompts))


@pytest.mark.parametrize(
    ("n", "per_step", "further", "ahead"), [(40, 4, 12, 0), (40, 4, 12, 2), (7, 3, 4, 1), (5, 5, 0, 3)]
)
def test_every_prompt_of_an_epoch_is_sampled_once(n, per_step, further, ahead):
    """Batches of ``per_step`` to ``per_step + further`` prompts, several in flight, with interruptions."""
    chance, counted = random.Random(n + ahead), Counter()
    order, launched = make_stream(n, per_step + further), deque()
    for batch in range(300):
        while len(launched) <= ahead:
            launched.append(order.take(batch))
        if chance.random() < 0.2:
            order = make_stream(n, per_step + further, state=order.state)
        places = launched.popleft()
        prompts = [order.prompt(place) for place in places]
        assert len(set(prompts)) == per_step + further
        needed = prompts[: per_step + chance.randint(0, further)]
        counted.update(f"p{i}" for i in needed)
        order.trained(places, groups_of(needed))
        assert len(order.state.waiting) <= (ahead + 3) * n
    assert order.sampled(place for places in launched for place in places) == counted
    while launched:
        order.trained(launched.popleft(), [])
    assert order.sampled() == counted
    least, most = min(counted.values()), max(counted.values())
    together = (per_step + further) * (ahead + 1)  # if that is more than an epoch, epochs run side by side
    assert len(counted) == n and most - least <= (2 if together <= n else ahead + 2)


SOURCES = ["math"] * 30 + ["code"] * 10 + ["chat"] * 60
WEIGHTS = {"math": 3.0, "code": 1.0, "chat": 4.0}
PROMPTS = [replace(p, source=s) for p, s in zip(fakes.prompts(100), SOURCES, strict=True)]


def test_every_stretch_of_draws_has_the_shares_of_the_weights():
    mixture = Mixture(SOURCES, WEIGHTS, seed=0)
    sources = [SOURCES[mixture.prompt(i)] for i in range(10_000)]
    for begin, size in [(0, 40), (137, 80), (4000, 400), (0, 10_000)]:
        counts = Counter(sources[begin : begin + size])
        for name, weight in WEIGHTS.items():
            assert abs(counts[name] - size * weight / 8) < 4


def test_each_source_is_drawn_in_separate_epochs():
    mixture = Mixture(SOURCES, WEIGHTS, seed=0)
    indices = [mixture.prompt(i) for i in range(2000)]
    for name in WEIGHTS:
        members = [i for i, source in enumerate(SOURCES) if source == name]
        draws = [i for i in indices if SOURCES[i] == name]
        assert len(draws) >= 2 * len(members)
        for epoch in range(len(draws) // len(members)):
            part = draws[epoch * len(members) : (epoch + 1) * len(members)]
            assert sorted(part) == members
        assert draws[: len(members)] != draws[len(members) : 2 * len(members)]
    again = Mixture(SOURCES, WEIGHTS, seed=0)
    assert [again.prompt(i) for i in reversed(range(2000))] == indices[::-1]
    assert [Mixture(SOURCES, WEIGHTS, seed=1).prompt(i) for i in range(50)] != indices[:50]


def test_batches_have_no_prompt_twice_keep_the_shares_and_resume_the_same():
    stream = PromptStream(PROMPTS, 16, seed=0, state=OrderState(), weights=WEIGHTS)
    batches, states = [], []
    for batch in range(60):
        batches.append([stream.prompt(index) for index in stream.take(batch)])
        states.append(stream.state)
    assert all(len(set(prompts)) == 16 for prompts in batches)
    counts = Counter(SOURCES[i] for prompts in batches for i in prompts)
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
    ("order", "weights", "counts", "per_step", "staleness", "most"),
    [
        ("launched", (1, 1), (4000, 600), 256, 1, 1200), ("launched", (1, 1), (400, 600), 128, 1, 800),
        ("launched", (1, 1), (40, 60), 32, 0, 80), ("launched", (7, 93), (7, 93), 32, 0, 100),
        ("launched", (1, 1), (4, 60), 4, 1, 8), ("completion", (1, 1), (4000, 600), 256, 1, 1200),
        ("completion", (7, 93), (7, 93), 32, 1, 100), ("completion", (1, 1), (4, 60), 4, 1, 8),
    ],
)  # fmt: skip
def test_dynamic_sampling_replaces_as_many_groups_as_the_sources_allow(
    order, weights, counts, per_step, staleness, most, extra
):
    """The prompts of the steps fit, so the mixture trains; replacement groups fill what is left."""
    sources = ["code"] * counts[0] + ["chat"] * counts[1]
    prompts = [replace(p, source=s) for p, s in zip(fakes.prompts(sum(counts)), sources, strict=True)]
    train = [{"path": f"{s}.jsonl", "weight": w} for s, w in zip(("code", "chat"), weights, strict=True)]
    config = fakes.config(
        data={"train": train},
        batch={"prompts_per_step": per_step, "samples_per_prompt": 2, "order": order},
        max_staleness=staleness,
        dynamic_sampling={"enabled": True, "max_extra_prompts": extra},
    )
    assert most_at_once(config.data.weights, prompts) == most
    admission = Admission.from_config(config, prompts)
    assert per_step <= admission.per_draw <= admission.drawn <= most
    if order == "launched" and extra is None:
        assert admission.per_draw == min(4 * per_step, most // (1 + staleness))
    check_weights(config.data, prompts, in_flight=admission.drawn)
    first_draw = build_order(config, prompts, OrderState()).take(0)
    assert len(first_draw) == (admission.per_draw if order == "launched" else 1)


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


UIDS = ["always", "never", "half", "new"]


def graded(uid, right, scored=16):
    graded_group = group_of([0.0] * scored, [1] * scored)
    outcomes = ("correct",) * right + ("wrong",) * (scored - right)
    object.__setattr__(graded_group.prompt, "uid", uid)
    object.__setattr__(graded_group, "outcomes", outcomes)
    return graded_group


def test_prompts_are_drawn_in_proportion_to_their_learning_signal():
    curriculum = Curriculum(UIDS, 1, seed=0, rates={})
    for _ in range(6):
        curriculum.trained([], [graded("always", 16), graded("never", 0), graded("half", 8)])
    rates = curriculum.state.pass_rates
    assert rates["half"][0] / rates["half"][1] == 0.5
    assert rates["never"] == (0.0, pytest.approx(16 * (2 - 0.5**5)))
    counts = Counter(UIDS[curriculum.take(step)[0]] for step in range(4000))
    share = 1 / (rates["never"][1] + 2)
    rare = share * (1 - share)
    total = 0.25 + 0.25 + 2 * rare
    for uid, weight in (("always", rare), ("never", rare), ("half", 0.25), ("new", 0.25)):
        expected = weight / total
        assert counts[uid] / 4000 == pytest.approx(expected, abs=4 * np.sqrt(expected / 4000))


def test_a_draw_repeats_and_holds_no_prompt_twice():
    first, second = (Curriculum([f"p{i}" for i in range(9)], 5, seed=3, rates={}) for _ in range(2))
    draws = [first.take(step) for step in range(20)]
    assert draws == [second.take(step) for step in range(20)]
    assert all(len(set(draw)) == 5 for draw in draws)
    assert len({tuple(draw) for draw in draws}) > 10


def test_unscored_samples_do_not_count_and_old_observations_decay():
    curriculum = Curriculum(UIDS, 1, seed=0, rates={"half": (4.0, 8.0)})
    unscored = graded("half", 2, scored=4)
    object.__setattr__(unscored, "outcomes", ("correct", "timeout", "error", "wrong"))
    curriculum.trained([], [unscored])
    assert curriculum.state.pass_rates["half"] == (2.0 + 1.0, 4.0 + 2.0)
