"""The simulated clock, engine and loop of `grpo-dist plan`, against times worked by hand."""

import asyncio
import math
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.config import RestartsConfig
from grpo_dist.runtime.restarts import Budget
from grpo_dist.tools.plan import simulation, virtual_clock
from grpo_dist.tools.plan.engines import Engine, EngineLost
from grpo_dist.tools.plan.failures import FailureRates
from grpo_dist.tools.plan.rank_failures import at_least, rank_failures
from grpo_dist.tools.plan.rates import Reached
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.simulation import simulate
from grpo_dist.tools.plan.stragglers import Stragglers
from grpo_dist.tools.plan.timeline import as_text
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.tools.plan.workload import Workload
from tests.support.fakes import config
from tests.support.made_times import Times, judges


def run(
    times,
    *,
    length=10,
    capacity=100,
    sharing=(),
    measured=(),
    steps=4,
    goes_wrong=None,
    turns=(1, 0),
    **changes,
):
    changes = {"rewards": {"num_workers": 64}, "sampling": {"max_new_tokens": 1000}} | changes
    lengths, (turns, tool_s) = tuple(measured) or (length,), turns
    workload = Workload(20, config().bench.lengths, 1000, measured=lengths, turns=turns, tool_s=tool_s)
    goes_wrong = goes_wrong or {}
    return simulate(
        Scenario(config(**changes), times, workload, capacity, frozenset(sharing), steps=steps, **goes_wrong)
    )


# The delay doubles with every restart within the window, so the window is short, too.
NO_BACK_OFF = {"restarts": {"backoff_s": 1e-6, "window_s": 1e-6}}

# The clock


def test_simulated_waiting_takes_no_real_time_and_timers_keep_their_order():
    async def main():
        loop, seen = asyncio.get_running_loop(), []

        async def after(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, loop.time()))

        await asyncio.gather(after(86_400.0), after(0.5), after(7.25))
        return seen

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
        found = await asyncio.to_thread(lambda: time.sleep(0.05) or 42)
        assert not timer.done() and asyncio.get_running_loop().time() == 0
        await timer
        return found, asyncio.get_running_loop().time()

    assert run_virtually(main) == (42, 1000)


def test_a_deadlocked_simulation_is_an_error():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlocked"):
        run_virtually(main)


# The engine


def ends(times, groups, *, capacity=100, then=None):
    """Return when the samples of each group (begin, prompt, lengths) finished, and the engine."""

    async def main():
        engine, loop = Engine(times, capacity), asyncio.get_running_loop()
        found = [[] for _ in groups]

        async def ask(i, begin, prompt, lengths):
            await asyncio.sleep(begin)
            await engine.generate(prompt, lengths, on_sample=lambda: found[i].append(loop.time()))

        others = [then(engine)] if then else []
        await asyncio.gather(*(ask(i, *group) for i, group in enumerate(groups)), *others)
        return found, engine

    return run_virtually(main)


def test_sequences_of_a_batch_end_with_their_lengths():
    found, engine = ends(Times(), [(0, 5, [3, 10, 3])])
    assert found == [[pytest.approx(0.3), pytest.approx(0.3), pytest.approx(1.0)]]
    assert [(s.begin, s.end) for s in engine.spans] == [(0, pytest.approx(1.0))]
    assert engine.steps == pytest.approx(10)


def test_a_longer_context_slows_decoding():
    # Two sequences with 10 tokens of prompt each share: 10 + 2 t tokens after t steps, of which 20 are made.
    found, _ = ends(Times(step=0.1, each=0.001), [(0, 10, [20, 20])])
    assert found[0][0] == pytest.approx(20 * 0.1 + 0.001 * (10 * 20 + 2 * 20 * 20 / 2))


def test_a_group_that_comes_later_joins_the_batch_and_its_prefill_delays_all():
    found, _ = ends(Times(prefill=0.01), [(0, 0, [10]), (0.5, 20, [10])])
    assert found == [[pytest.approx(1.0 + 0.2)], [pytest.approx(0.5 + 0.2 + 1.0)]]


def test_sequences_beyond_the_batch_size_wait_in_the_engine():
    found, _ = ends(Times(), [(0, 0, [10, 4, 6, 2])], capacity=2)
    assert sorted(found[0]) == pytest.approx([0.4, 1.0, 1.0, 1.2])


def test_a_paused_engine_resumes_after_its_cache_is_computed_again():
    async def update(engine):
        await asyncio.sleep(0.5)
        engine.pause()
        await asyncio.sleep(3)
        engine.resume()

    found, _ = ends(Times(prefill=0.01), [(0, 0, [10])], then=update)
    assert found == [[pytest.approx(0.5 + 3 + 5 * 0.01 + 0.5)]]


def test_a_failed_engine_loses_its_requests():
    async def main():
        engine = Engine(Times(), 10)
        asyncio.get_running_loop().call_later(0.5, engine.fail)
        with pytest.raises(EngineLost):
            await engine.generate(5, [10, 2], on_sample=lambda: None)
        await engine.generate(5, [10], on_sample=lambda: None)
        return asyncio.get_running_loop().time()

    assert run_virtually(main) == pytest.approx(0.5 + 1.0)


# The loop


def test_without_staleness_a_step_is_the_sum_of_its_stages():
    found = run(Times())
    assert found.step_s == pytest.approx(1.0 + 0.5 + 2.0 + 0.3)
    assert found.stage_s == {
        "sample": pytest.approx(1.0), "score": pytest.approx(0.5), "update": pytest.approx(2.0),
        "sync": pytest.approx(0.3),
    }  # fmt: skip
    assert found.idle == {"rollout": pytest.approx(1 - 1 / 3.8), "policy": pytest.approx(1 - 2.3 / 3.8)}
    assert (found.samples, found.tokens, found.completion_tokens) == (8, 8 * 30, 80)
    assert found.tokens_per_s == pytest.approx(240 / 3.8) and found.staleness == 0


@pytest.mark.parametrize("prefill", [0.0, 0.01])
def test_a_turn_follows_its_environments_answer_and_computes_the_prompt_once(prefill):
    """Eight samples of 10 tokens in two turns of 0.5 s, and 0.7 s between; 4 prompts of 20 tokens."""
    found = run(Times(prefill=prefill), turns=(2, 0.7))
    assert found.step_s == pytest.approx(0.5 + 0.7 + 0.5 + 4 * 20 * prefill + 0.5 + 2.0 + 0.3)
    assert found.stage_s["sample"] == pytest.approx(1.0 + 4 * 20 * prefill)
    assert (found.samples, found.completion_tokens) == (8, 80)


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
    found = run(Times(), length=length, max_staleness=1)
    assert found.step_s == pytest.approx(longer + 0.3, abs=1e-6) and found.staleness == 1


def test_reference_workers_divide_the_groups():
    times = Times(reference=1.0, score=0.0)
    changes = {"algorithm": {"kl": {"coef": 0.1}}, "reference": {"num_workers": 2}}
    found = run(times, **changes)  # 4 groups, 2 workers: two seconds after the samples
    assert found.step_s == pytest.approx(1.0 + 2.0 + 2.0 + 0.3)
    assert found.stage_s["logprobs"] == pytest.approx(2.0)


def test_reward_models_score_at_once_and_before_a_grader():
    """4 groups: of one worker's the last is scored after 4 times 0.75 s; the other model's two have long
    been done by then. A grader follows.
    """
    times = Times(models={"slow": 0.75, "steps": 1.0})
    found = run(times, goes_wrong=judges(slow=1, steps=2))
    assert found.step_s == pytest.approx(1.0 + 4 * 0.75 + 0.5 + 2.0 + 0.3)
    assert found.stage_s["reward_model"] == pytest.approx(4 * 0.75)
    tracks = {name for name in found.bars if name.startswith("reward-model")}
    assert tracks == {"reward-model-slow-0", "reward-model-steps-0", "reward-model-steps-1"}
    own = found.bars["reward-model-slow-0"]
    assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(own))
    text = as_text(found)
    line = next(line for line in text if "reward-model-slow-0 |" in line)
    assert line.count("m") > 30 and len({len(line) for line in text[:-1]}) == 1


def test_a_reward_model_that_is_too_slow_bounds_the_step():
    """One step ahead everything else hides behind it: 4 groups of 3 s on one worker, or 1.5 s on two."""
    for workers, step_s in ((1, 12.0), (2, 6.0)):
        times = Times(score=0.0, models={"slow": 3.0})
        found = run(times, max_staleness=1, goes_wrong=judges(slow=workers))
        # Mode drain: the next batch is scored before the sync of 0.3 s, and only then one more is sampled.
        assert found.step_s == pytest.approx(step_s + 1.0 + 0.3)
        assert found.idle["policy"] > 0.5 and found.idle["rollout"] > 0.8


def test_colocated_roles_change_turns_twice_a_step():
    assert run(Times(), sharing=("policy", "rollout")).step_s == pytest.approx(3.8 + 2 * 0.25)


def test_groups_go_to_the_least_loaded_engine():
    found = run(Times(), rollout={"num_workers": 4}, capacity=2)
    assert {len(found.bars[f"rollout-{i}"]) for i in range(4)} == {6 - 1}  # one group per step, one at a time
    assert found.queue == 0 and found.step_s == pytest.approx(3.8)


def test_groups_wait_for_an_engine_with_capacity():
    # 4 groups of 2 on one engine that decodes one sequence at a time: two of them wait in the driver's queue.
    found = run(Times(), capacity=1)
    assert found.queue == 3 and found.stage_s["sample"] == pytest.approx(8 * 1.0)


def test_a_long_tail_keeps_the_engine_and_the_driver_waiting():
    even = run(Times(score=0.0), measured=[50])
    uneven = run(Times(score=0.0), measured=[1, 99])  # the same mean length
    assert uneven.stage_s["sample"] == pytest.approx(9.9) and even.stage_s["sample"] == pytest.approx(5.0)
    assert uneven.idle["policy"] > even.idle["policy"]


def test_kept_samples_continue_under_new_weights_and_lose_nothing():
    times = Times(update=1.0, score=0.0)
    found = run(times, measured=[5, 50], max_staleness=2, weight_sync={"mode": "keep"}, steps=6)
    assert found.samples == 8 and 0 < found.staleness <= 2
    assert found.step_s < 5.0 + 1.0 + 0.3  # not every step waits for the longest samples


def test_failed_engines_are_replaced_and_no_sample_is_lost():
    scenario = Scenario(
        config(rollout={"num_workers": 3}, rewards={"num_workers": 9}, sampling={"max_new_tokens": 1000}),
        Times(),
        Workload(20, config().bench.lengths, 1000, measured=(30, 300)),
        capacity=8,
        failures=FailureRates(40.0, restart_s=25.0),
        steps=8,
    )
    found = simulate(scenario)
    assert found.failed_engines > 2 and found.samples == 8
    assert any(span.stage == "restart" for spans in found.bars.values() for span in spans)
    calm = run(Times(), measured=[30, 300], rollout={"num_workers": 3}, steps=8)
    assert found.step_s > calm.step_s
    assert simulate(scenario).ends == found.ends  # the same seed, the same failures


def test_a_step_waits_for_stragglers():
    """A step takes 1.0 s to sample, 0.5 to score, 2.0 to update and 0.3 to sync."""
    two = {"rollout": {"num_workers": 2}}
    assert run(Times(), **two).step_s == pytest.approx(3.8)
    slow_engine = run(Times(), goes_wrong={"stragglers": Stragglers(engines=1, engine_factor=2.0)}, **two)
    assert slow_engine.step_s == pytest.approx(4.8)
    slow_rank = run(Times(), goes_wrong={"stragglers": Stragglers(rank_factor=1.5)}, **two)
    assert slow_rank.step_s == pytest.approx(4.8)


def failures_of(c, **times):
    ranks, restarts = c.policy.num_workers, c.cluster.restarts
    return rank_failures(ranks, c.checkpoint, restarts, steps=c.steps, **times)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
def test_the_predicted_cost_of_failed_ranks_is_what_the_loop_spends_on_them(share):
    """Five steps of 3.8 s between checkpoints, ``share`` of the mean time between losses together; the policy
    is asked for nothing in the first 1.5 s of a step. Each stretch is a sample of its own, so the mean of so
    many is normal with the standard error of the stretches, and the seed is one of all.
    """
    stretches, every_s = {0.1: 80, 0.5: 60, 2.0: 50}[share], 5 * 3.8 / share
    settings = {"checkpoint": {"every": 5}, "policy": {"num_workers": 2}}
    wrong = {"failures": FailureRates(rank_s=every_s, restart_s=5.0), "warmup_steps": 0}
    found = run(Times(), goes_wrong=wrong, steps=5 * stretches, cluster=NO_BACK_OFF, **settings)
    each = np.diff([0.0, *found.ends[4::5]])
    error = each.std(ddof=1) / stretches**0.5
    formula = failures_of(
        config(steps=5 * stretches, **settings),
        step_s=3.8,
        unseen_s=1.5,
        failure_every_s=2 * every_s,
        restart_s=5.0,
    )
    assert formula.every_s == every_s and formula.planned_s == pytest.approx(19.0 * stretches)
    assert len(each) == stretches and each.mean() == pytest.approx(5 * found.step_s)
    expected = formula.expected_s / stretches
    assert abs(each.mean() - expected) < 3 * error and error < 0.15 * expected
    half_of_the_steps = 19.0 * (1 + (5.0 + 9.5) / every_s)  # exact if failures are rare
    assert (abs(each.mean() - half_of_the_steps) > 3 * error) == (share == 2.0)


def test_the_cost_of_a_failure_agrees_with_dalys_formula():
    settings = {"checkpoint": {"every": 10}, "policy": {"num_workers": 2}, "steps": 100}
    at = {"step_s": 2.0, "failure_every_s": 80.0, "restart_s": 20.0}
    found = failures_of(config(**settings), unseen_s=0.0, **at)
    assert found.expected_s == pytest.approx(10 * 40 * math.exp(20 / 40) * (math.exp(20 / 40) - 1))
    assert found.share == pytest.approx(1 - 200 / found.expected_s)
    later = failures_of(config(**settings), unseen_s=1.0, **at)
    assert found.expected_s < later.expected_s < found.expected_s * 1.02  # half of a second more, at most
    rare = failures_of(config(**settings), unseen_s=0.0, **at | {"failure_every_s": 8e7})
    assert rare.expected_s - 200 == pytest.approx(200 / 4e7 * (20 + 10), rel=1e-3)  # J. W. Young's, 1974
    # Of 25 steps the last stretch has five; without checkpoints all is one, and a thousand are never done.
    uneven = failures_of(config(**settings | {"steps": 25}), unseen_s=0.0, **at)
    last = 40 * math.exp(20 / 40) * (math.exp(10 / 40) - 1)
    assert uneven.expected_s == pytest.approx(found.expected_s / 10 * 2 + last)
    none = failures_of(config(**settings | {"checkpoint": {"every": 0}}), unseen_s=0.0, **at)
    assert none.expected_s == pytest.approx(40 * math.exp(20 / 40) * (math.exp(200 / 40) - 1))
    never = failures_of(config(steps=10**6, checkpoint={"every": 0}), unseen_s=0.0, **at)
    assert never.expected_s == math.inf and never.share == 1.0 == never.ends
    assert failures_of(config(), unseen_s=0.0, **at | {"failure_every_s": 0.0}) is None


def test_the_restart_budget_ends_a_run_with_the_poisson_probability():
    assert at_least(0, 2.0) == 1.0 and at_least(1, 2.0) == pytest.approx(1 - math.exp(-2))
    assert at_least(3, 0.5) == pytest.approx(1 - math.exp(-0.5) * (1 + 0.5 + 0.125))
    assert at_least(10**9, 3.0) == 0.0 and at_least(3, 5000.0) == 1.0

    def ends(**restarts):
        c = config(steps=100, checkpoint={"every": 10}, cluster={"restarts": restarts})
        return failures_of(c, step_s=2.0, unseen_s=0.0, failure_every_s=1e5, restart_s=20.0).ends

    assert ends(max_per_worker=0) == pytest.approx(1 - math.exp(-200 / 1e5), rel=0.01)  # any failure
    two = 200 / 1e5 * (1 - math.exp(-0.01))  # two failures within a thousand seconds
    assert ends(max_per_worker=1, window_s=1000.0) == pytest.approx(two, rel=0.01)
    assert ends(max_per_worker=3, window_s=1000.0) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("graders", [1, 2])
def test_cancelled_graders_serve_the_next_group_and_their_time_is_in_the_timeline(graders):
    """A lost rank cancels the batch that is sampled ahead, including groups in grading."""
    found = run(
        Times(), goes_wrong={"failures": FailureRates(rank_s=15.0, restart_s=5.0)}, steps=60, max_staleness=1,
        rewards={"num_workers": graders}, cluster=NO_BACK_OFF, checkpoint={"every": 5},
    )  # fmt: skip
    graded = [span for i in range(graders) for span in found.bars[f"reward-{i}"]]
    assert found.rank_restarts > 3 and len(found.ends) == 63
    assert any(0 < span.end - span.begin < 0.499 for span in graded)  # grading takes half a second
    for own in (found.bars[f"reward-{i}"] for i in range(graders)):
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(own))


@pytest.mark.slow
def test_groups_that_wait_when_a_rank_fails_stop_waiting():
    """At most two batches of 16 groups are in flight, on an engine with capacity for one group."""
    queue = {"batch": {"prompts_per_step": 16, "samples_per_prompt": 4}, "max_staleness": 1, "capacity": 2}
    calm = run(Times(), steps=10, **queue)
    found = run(
        Times(), goes_wrong={"failures": FailureRates(rank_s=50.0, restart_s=5.0)}, steps=10,
        cluster=NO_BACK_OFF, checkpoint={"every": 2}, **queue,
    )  # fmt: skip
    assert found.rank_restarts > 5 and calm.queue == found.queue == 31


def test_an_engine_that_fails_while_the_ranks_restart_serves_when_its_own_restart_ends():
    wrong = {"failures": FailureRates(rank_s=40.0, engine_s=60.0, restart_s=30.0)}
    found = run(
        Times(), capacity=4, steps=40, goes_wrong=wrong, cluster=NO_BACK_OFF, checkpoint={"every": 1}
    )  # fmt: skip
    own, ranks = found.bars["rollout-0"], found.bars["policy"]
    restarts = [span for span in own if span.stage == "restart"]
    together = [r for r in restarts if any(p.stage == "restart" and p.begin < r.begin < p.end for p in ranks)]
    assert len(together) > 2
    for down in restarts:
        for sampled in (span for span in own if span.stage == "sample"):
            assert sampled.end <= down.begin + 1e-9 or sampled.begin >= down.end - 1e-9


def test_a_rank_that_fails_while_the_ranks_restart_makes_them_restart_again():
    wrong = {"failures": FailureRates(rank_s=20.0, restart_s=20.0)}
    found = run(Times(), steps=20, goes_wrong=wrong, cluster=NO_BACK_OFF, checkpoint={"every": 1})
    restarts = [span for span in found.bars["policy"] if span.stage == "restart"]
    lengths = [span.end - span.begin for span in restarts]
    whole = [n for n in lengths if n == pytest.approx(20.0)]
    assert len(restarts) == found.rank_restarts > len(whole) > 2 and max(lengths) < 20.0 + 1e-6
    for one, then in pairwise(restarts):
        if one.end - one.begin < 20.0 - 1e-6:
            assert then.begin == pytest.approx(one.end, abs=1e-3)  # nothing else comes between them


def test_figures_of_a_run_with_rollbacks_include_repeated_work(monkeypatch):
    """Wasted work counts too: eight sequences at once, and the driver's time for each step made."""
    spent = iter([0.0, 1000.0])
    monkeypatch.setattr(simulation, "time", SimpleNamespace(process_time=lambda: next(spent)))
    wrong = {"failures": FailureRates(rank_s=20.0, restart_s=5.0)}
    found = run(Times(), steps=30, goes_wrong=wrong, cluster=NO_BACK_OFF, checkpoint={"every": 5})
    made = sum(s.stage == "sync" and s.end - s.begin > 0.3 - 1e-9 for s in found.bars["policy"])
    assert found.rank_restarts > 3 and made > len(found.ends) + 3
    assert found.sequences == pytest.approx(8, rel=1e-3)
    assert found.driver_cpu_s == pytest.approx(1000 / made, rel=0.01)


def test_a_thousand_restarts_within_the_window_wait_a_minute_each():
    often = RestartsConfig(max_per_worker=5000, backoff_s=0.5, window_s=1e8)
    budget = Budget(often, clock=lambda: 0.0)
    assert [budget.take() for _ in range(2000)][:8] == [0.5, 1, 2, 4, 8, 16, 32, 60]
    assert budget.take() == 60.0


@pytest.mark.slow
def test_a_run_on_a_thousand_gpus_finishes_despite_lost_ranks():
    lost = {"failures": FailureRates(rank_s=40.0, engine_s=3000.0, restart_s=15.0)}
    shape = {"rollout": {"num_workers": 256, "tensor_parallel_size": 2}, "policy": {"num_workers": 512}}
    assert 256 * 2 + 512 == 1024
    batch = {"prompts_per_step": 512, "samples_per_prompt": 2}
    found = run(
        Times(step=0.02, score=0.1, update=8.0), measured=(50, 200), steps=4, capacity=1, goes_wrong=lost,
        max_staleness=1, batch=batch, cluster=NO_BACK_OFF, checkpoint={"every": 2}, **shape,
    )  # fmt: skip
    assert found.rank_restarts > 0 and found.failed_engines > 0 and found.samples == 512 * 2
    assert any(span.stage == "restart" for span in found.bars["policy"])
    # Groups of two batches, one per engine, plus those of lost engines.
    assert 512 < found.queue <= 2 * 512 - 256 + found.failed_engines


def test_dynamic_sampling_draws_further_groups():
    changes = {"dynamic_sampling": {"enabled": True}}
    workload = Workload(20, config().bench.lengths, 1000, measured=(10,))
    settings = config(sampling={"max_new_tokens": 1000}, rewards={"num_workers": 64}, **changes)
    all_signal, half = (
        simulate(Scenario(settings, Times(), workload, 100, signal_share=share)) for share in (1.0, 0.5)
    )
    assert all_signal.step_s == pytest.approx(3.8) and half.step_s > 3.8 + 1.0


def test_the_drivers_time_delays_many_groups():
    slow = Times(reached=Reached(sample_s=0.1, overhead_s=0.2))
    # Two samples of each of 4 groups, one group at a time on one thread; then the last is scored.
    assert run(slow).step_s == pytest.approx(1.0 + 4 * 2 * 0.1 + 0.5 + 2.0 + 0.3 + 0.2)


def test_deadlines_of_the_configuration_do_not_end_a_simulation():
    long = run(Times(step=40.0), cluster={"timeouts": {"sample_s": 60.0}})
    assert long.longest_batch_s == pytest.approx(400)


def test_a_thousand_gpus_take_a_few_events_for_each_sample(monkeypatch):
    jumps = 0
    real = virtual_clock.VirtualLoop.jump

    def counted(loop, seconds):
        nonlocal jumps
        jumps += 1
        real(loop, seconds)

    monkeypatch.setattr(virtual_clock.VirtualLoop, "jump", counted)
    lengths = np.random.default_rng(0).lognormal(6.5, 0.9, 4096).astype(int).clip(1, 1000)
    found = run(
        Times(step=0.02, score=0.1, update=20.0),
        measured=lengths.tolist(),
        steps=2,
        max_staleness=1,
        batch={"prompts_per_step": 256, "samples_per_prompt": 8},
        rollout={"num_workers": 512},
        policy={"num_workers": 512},
        sampling={"max_new_tokens": 8192},
    )
    samples = 256 * 8 * 5  # in all steps
    assert found.samples == 256 * 8 and 0 < jumps < 8 * samples
    assert found.tokens == pytest.approx(256 * 8 * (lengths.mean() + 20), rel=0.1)
    assert found.driver_cpu_s > 0
