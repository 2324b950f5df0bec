"""The simulated clock, engine and loop of `grpo-dist plan`, against times worked by hand."""

import asyncio
import time
from itertools import pairwise

import numpy as np
import pytest

from grpo_dist.loop.pipeline import Pipeline
from grpo_dist.tools.plan import simulation, virtual_clock
from grpo_dist.tools.plan.engines import Engine
from grpo_dist.tools.plan.rates import Reached
from grpo_dist.tools.plan.simulation import Scenario, simulate
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.tools.plan.workload import Workload
from tests.support.fakes import config
from tests.support.plans import Times, judges


def run(
    times, *, length=10, capacity=100, sharing=(), measured=(), steps=4, frozen=(), turns=(1, 0), **changes
):
    changes = {"rewards": {"num_workers": 64}, "sampling": {"max_new_tokens": 1000}} | changes
    lengths, (turns, tool_s) = tuple(measured) or (length,), turns
    workload = Workload(20, config().bench.lengths, 1000, measured=lengths, turns=turns, tool_s=tool_s)
    return simulate(
        Scenario(config(**changes), times, workload, capacity, frozenset(sharing), steps=steps, frozen=frozen)
    )


# The clock


def test_simulated_waiting_takes_no_real_time_and_timers_keep_their_order():
    async def main():
        loop, wakeups = asyncio.get_running_loop(), []

        async def after(seconds):
            await asyncio.sleep(seconds)
            wakeups.append((seconds, loop.time()))

        await asyncio.gather(after(86_400.0), after(0.5), after(7.25))
        return wakeups

    begin = time.monotonic()
    assert run_virtually(main) == [(0.5, 0.5), (7.25, 7.25), (86_400.0, 86_400.0)]
    assert time.monotonic() - begin < 3600  # instead of a simulated day


def test_deadlines_follow_the_simulated_clock():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.sleep(101)
        return asyncio.get_running_loop().time()

    assert run_virtually(main) == 100


def test_the_clock_stops_while_a_thread_computes():
    async def main():
        timer = asyncio.create_task(asyncio.sleep(1000))
        result = await asyncio.to_thread(lambda: time.sleep(0.05) or 42)
        assert not timer.done() and asyncio.get_running_loop().time() == 0
        await timer
        return result, asyncio.get_running_loop().time()

    assert run_virtually(main) == (42, 1000)


def test_a_deadlocked_simulation_is_an_error():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlocked"):
        run_virtually(main)


# The engine


def ends(times, groups, *, capacity=100, then=None):
    """Return the end times of the samples of each group (begin, prompt, lengths), and the engine."""

    async def main():
        engine, loop = Engine(times, capacity), asyncio.get_running_loop()
        end_times = [[] for _ in groups]

        async def ask(i, begin, prompt, lengths):
            await asyncio.sleep(begin)
            await engine.generate(prompt, lengths, on_sample=lambda: end_times[i].append(loop.time()))

        others = [then(engine)] if then else []
        await asyncio.gather(*(ask(i, *group) for i, group in enumerate(groups)), *others)
        return end_times, engine

    return run_virtually(main)


def test_sequences_of_a_batch_end_with_their_lengths():
    end_times, engine = ends(Times(), [(0, 5, [3, 10, 3])])
    assert end_times == [[pytest.approx(0.3), pytest.approx(0.3), pytest.approx(1.0)]]
    assert [(s.begin, s.end) for s in engine.spans] == [(0, pytest.approx(1.0))]
    assert engine.steps == pytest.approx(10)


def test_a_longer_context_slows_decoding():
    # Two sequences share a prompt of 10 tokens: 10 + 2 t tokens after t steps, and 20 steps in all.
    end_times, _ = ends(Times(step=0.1, each=0.001), [(0, 10, [20, 20])])
    assert end_times[0][0] == pytest.approx(20 * 0.1 + 0.001 * (10 * 20 + 2 * 20 * 20 / 2))


def test_a_group_that_comes_later_joins_the_batch_and_its_prefill_delays_all():
    end_times, _ = ends(Times(prefill=0.01), [(0, 0, [10]), (0.5, 20, [10])])
    assert end_times == [[pytest.approx(1.0 + 0.2)], [pytest.approx(0.5 + 0.2 + 1.0)]]


def test_sequences_beyond_the_batch_size_wait_in_the_engine():
    end_times, _ = ends(Times(), [(0, 0, [10, 4, 6, 2])], capacity=2)
    assert sorted(end_times[0]) == pytest.approx([0.4, 1.0, 1.0, 1.2])


async def pause(engine):
    """Pause the engine for 3 s after 0.5 s."""
    await asyncio.sleep(0.5)
    engine.pause()
    await asyncio.sleep(3)
    engine.resume()


def test_a_paused_engine_resumes_after_its_cache_is_computed_again():
    end_times, _ = ends(Times(prefill=0.01), [(0, 0, [10])], then=pause)
    assert end_times == [[pytest.approx(0.5 + 3 + 5 * 0.01 + 0.5)]]


@pytest.mark.parametrize("capacity", [100, 3])
def test_ends_of_samples_that_nobody_waits_for_change_no_time(capacity):
    rng = np.random.default_rng(1)
    groups = [(begin, 3, rng.integers(1, 40, 4).tolist()) for begin in (0, 0, 0.31, 1.2, 5.0)]

    async def pause_unwatched(engine):
        engine.is_watched = lambda: False
        await pause(engine)

    times = Times(each=0.001, prefill=0.01)
    end_times, engine = ends(times, groups, capacity=capacity, then=pause_unwatched)
    each, other = ends(times, groups, capacity=capacity, then=pause)
    assert [max(group) for group in end_times] == pytest.approx([max(group) for group in each])
    assert (engine.steps, engine.tokens) == pytest.approx((other.steps, other.tokens))


# The loop


@pytest.mark.parametrize("how", [
    {},
    {"max_staleness": 1},
    {"max_staleness": 2, "weight_sync": {"mode": "keep"}, "capacity": 2},
    {"max_staleness": 1, "algorithm": {"kl": {"coef": 0.1}}, "rollout": {"num_workers": 3}},
])  # fmt: skip
def test_groups_without_tasks_take_the_time_of_groups_with_them(monkeypatch, how):
    lengths = np.random.default_rng(0).lognormal(3, 0.9, 512).astype(int).clip(1, 200).tolist()
    batch = {"prompts_per_step": 8, "samples_per_prompt": 4}

    class Scored(Times):
        def scoring_s(self, model, prompt, lengths):
            return 0.01 * sum(lengths)

    def planned():
        return run(Scored(step=0.02, each=0.001, prefill=0.01), measured=lengths, batch=batch, **how)

    direct = planned()
    monkeypatch.setattr(simulation, "PlannedPipeline", Pipeline)
    along = planned()
    ends = [[span.end for span in result.bars["policy"]] for result in (direct, along)]
    assert ends[0] == pytest.approx(ends[1]) and direct.stage_s == pytest.approx(along.stage_s)
    assert (direct.tokens, direct.staleness) == (along.tokens, along.staleness)
    assert direct.longest_batch_s == pytest.approx(along.longest_batch_s)


def test_without_staleness_a_step_is_the_sum_of_its_stages():
    result = run(Times())
    assert result.step_s == pytest.approx(1.0 + 0.5 + 2.0 + 0.3)
    assert result.stage_s == {
        "sample": pytest.approx(1.0), "score": pytest.approx(0.5), "update": pytest.approx(2.0),
        "sync": pytest.approx(0.3),
    }  # fmt: skip
    assert result.idle == {"rollout": pytest.approx(1 - 1 / 3.8), "policy": pytest.approx(1 - 2.3 / 3.8)}
    assert (result.samples, result.tokens, result.completion_tokens) == (8, 8 * 30, 80)
    assert result.tokens_per_s == pytest.approx(240 / 3.8) and result.staleness == 0
    updates = [span for span in result.bars["policy"] if span.stage == "update"]
    assert all(a.end <= b.begin for a, b in pairwise(updates))


@pytest.mark.parametrize("prefill", [0.0, 0.01])
def test_a_turn_follows_its_environments_answer_and_computes_the_prompt_once(prefill):
    """Eight samples of 10 tokens in two turns of 0.5 s with 0.7 s between them; 4 prompts of 20 tokens."""
    result = run(Times(prefill=prefill), turns=(2, 0.7))
    assert result.step_s == pytest.approx(0.5 + 0.7 + 0.5 + 4 * 20 * prefill + 0.5 + 2.0 + 0.3)
    assert result.stage_s["sample"] == pytest.approx(1.0 + 4 * 20 * prefill)
    assert (result.samples, result.completion_tokens) == (8, 80)


def test_an_engine_samples_other_episodes_while_one_waits():
    """Four of eight fit: two batches alternate, each with its tool while the other is sampled."""
    assert run(Times(), capacity=4).stage_s["sample"] == pytest.approx(2.0)
    assert run(Times(), capacity=4, turns=(2, 0.5)).step_s == pytest.approx(2.0 + 0.5 + 2.0 + 0.3)


def test_the_cache_of_a_later_turn_holds_all_before_it():
    """One sample of a prompt of 20 tokens: 20 + t tokens after t steps, in both turns."""
    one = {"batch": {"prompts_per_step": 1, "samples_per_prompt": 2}}
    whole, halves = (run(Times(each=0.001), turns=turns, **one).step_s for turns in ((1, 0), (2, 0)))
    assert halves == pytest.approx(whole)


@pytest.mark.parametrize("length, longer", [(10, 2.0), (40, 4.5)])
def test_one_step_ahead_it_is_the_longer_of_sampling_and_training(length, longer):
    result = run(Times(), length=length, max_staleness=1)
    assert result.step_s == pytest.approx(longer + 0.3, abs=1e-6) and result.staleness == 1


def test_reference_workers_divide_the_groups():
    times = Times(reference=1.0, score=0.0)
    changes = {"algorithm": {"kl": {"coef": 0.1}}, "reference": {"num_workers": 2}}
    result = run(times, **changes)  # 4 groups, 2 workers: two seconds after the samples
    assert result.step_s == pytest.approx(1.0 + 2.0 + 2.0 + 0.3)
    assert result.stage_s["logprobs"] == pytest.approx(2.0)


def test_reward_models_score_at_once_and_before_a_grader():
    """One worker scores the last of 4 groups after 4 times 0.75 s; the two workers of the other model are
    done before. A grader follows.
    """
    times = Times(models={"slow": 0.75, "steps": 1.0})
    result = run(times, **judges(slow=1, steps=2))
    assert result.step_s == pytest.approx(1.0 + 4 * 0.75 + 0.5 + 2.0 + 0.3)
    assert result.stage_s["reward_model"] == pytest.approx(4 * 0.75)
    tracks = {name for name in result.bars if name.startswith("reward-model")}
    assert tracks == {"reward-model-slow-0", "reward-model-steps-0", "reward-model-steps-1"}
    spans = result.bars["reward-model-slow-0"]
    assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(spans))


def test_a_reward_model_that_is_too_slow_bounds_the_step():
    """One step ahead it hides everything else: 4 groups of 3 s on one worker, or 1.5 s on two."""
    for workers, step_s in ((1, 12.0), (2, 6.0)):
        times = Times(score=0.0, models={"slow": 3.0})
        result = run(times, max_staleness=1, **judges(slow=workers))
        # In mode drain the next batch is scored before the sync of 0.3 s; only then is one more sampled.
        assert result.step_s == pytest.approx(step_s + 1.0 + 0.3)
        assert result.idle["policy"] > 0.5 and result.idle["rollout"] > 0.8


def test_colocated_roles_change_turns_twice_a_step():
    assert run(Times(), sharing=("policy", "rollout")).step_s == pytest.approx(3.8 + 2 * 0.25)


def test_kept_samples_continue_under_new_weights_and_lose_nothing():
    times = Times(update=1.0, score=0.0)
    result = run(times, measured=[5, 50], max_staleness=2, weight_sync={"mode": "keep"}, steps=6)
    assert result.samples == 8 and 0 < result.staleness <= 2
    assert result.step_s < 5.0 + 1.0 + 0.3  # not every step waits for the longest samples


@pytest.mark.parametrize("bounds", [{}, {"mean_low": 0.6}, {"mean_high": 0.1}])
def test_dynamic_sampling_draws_further_groups(bounds):
    """All fake groups are half right, so a range of their mean would replace all of them or none."""
    changes = {"dynamic_sampling": {"enabled": True, **bounds}}
    workload = Workload(20, config().bench.lengths, 1000, measured=(10,))
    settings = config(sampling={"max_new_tokens": 1000}, rewards={"num_workers": 64}, **changes)
    all_signal, half = (
        simulate(Scenario(settings, Times(), workload, 100, signal_share=share)) for share in (1.0, 0.5)
    )
    assert all_signal.step_s == pytest.approx(3.8) and half.step_s > 3.8 + 1.0


def test_the_drivers_time_delays_many_groups():
    slow = Times(reached=Reached(sample_s=0.1, overhead_s=0.2))
    # Two samples in each of 4 groups, one group at a time on one thread; then the last group is scored.
    assert run(slow).step_s == pytest.approx(1.0 + 4 * 2 * 0.1 + 0.5 + 2.0 + 0.3 + 0.2)


def test_a_thousand_gpus_take_a_few_events_for_each_sample(monkeypatch):
    jumps = 0
    real = virtual_clock.VirtualLoop.jump

    def count_jump(loop, seconds):
        nonlocal jumps
        jumps += 1
        real(loop, seconds)

    monkeypatch.setattr(virtual_clock.VirtualLoop, "jump", count_jump)
    lengths = np.random.default_rng(0).lognormal(6.5, 0.9, 4096).astype(int).clip(1, 1000)
    result = run(
        Times(step=0.02, score=0.1, update=20.0), measured=lengths.tolist(), steps=2, max_staleness=1,
        batch={"prompts_per_step": 256, "samples_per_prompt": 8}, sampling={"max_new_tokens": 8192},
        rollout={"num_workers": 512}, policy={"num_workers": 512},
    )  # fmt: skip
    samples = 256 * 8 * 5  # in all steps
    assert result.samples == 256 * 8 and 0 < jumps < 8 * samples
    assert result.tokens == pytest.approx(256 * 8 * (lengths.mean() + 20), rel=0.1)


def test_groups_wait_for_an_engine_with_capacity():
    # 4 groups of 2 on one engine that decodes one sequence at a time: two groups wait in the driver's queue.
    result = run(Times(), capacity=1)
    assert result.stage_s["sample"] == pytest.approx(8 * 1.0)


def test_a_long_tail_keeps_the_engine_and_the_driver_waiting():
    even = run(Times(score=0.0), measured=[50])
    uneven = run(Times(score=0.0), measured=[1, 99])  # the same mean length
    assert uneven.stage_s["sample"] == pytest.approx(9.9) and even.stage_s["sample"] == pytest.approx(5.0)
    assert uneven.idle["policy"] > even.idle["policy"]
