"""Estimates from samples, against numbers computed by hand and enumeration of every subset."""

import asyncio
import dataclasses
import math
from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from grpo_dist.algorithms.intervals import wilson
from grpo_dist.driver import run
from grpo_dist.errors import SamplesFailed
from grpo_dist.evaluation.estimates import estimate, mean_of, measures_of_problem, pass_at_k
from grpo_dist.evaluation.result import JudgedProblem, Verdict, measure
from grpo_dist.evaluation.sampling import EvalSet, evaluate
from grpo_dist.evaluation.votes import final_answers, majority_at_k, numbered
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.types import ToolCall, Turn
from tests.support import fakes
from tests.support.patience import HANG_S

NAN = float("nan")


def flags(text: str) -> np.ndarray:
    """Parse "10x" as correct, wrong, unscored."""
    return np.array([NAN if c == "x" else float(c) for c in text], dtype=np.float32)


def summarise(correct, ks) -> dict[str, float]:
    """Return the measures of a set with their errors, from the flags of its problems."""
    problems = []
    for problem_flags in correct:
        outcomes = [None if math.isnan(flag) else float(flag) for flag in problem_flags]
        verdict = Verdict("key", "uid", outcomes, None, (), [1] * len(outcomes), 0)
        problems.append(JudgedProblem.from_verdict("set", fakes.prompts(1)[0], {}, verdict, ks))
    metrics = next(measure(problems)).metrics()
    return {name.removeprefix("eval/set/"): value for name, value in metrics.items() if "@" in name}


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = sum(any(i < c for i in subset) for subset in combinations(range(n), k))
                assert pass_at_k(n, c, k) == pytest.approx(hits / comb(n, k), abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_overflow():
    exact = 1 - comb(9_990, 500) / comb(10_000, 500)
    assert pass_at_k(10_000, 10, 500) == pytest.approx(exact, rel=1e-12)


def test_summary_of_three_problems_worked_by_hand():
    summary = summarise([flags("1000"), flags("1100"), flags("0000")], [1, 2])
    # pass@1: 1/4, 1/2, 0. pass@2: 1 - 3/6, 1 - 1/6, 0.
    assert summary["pass@1"] == pytest.approx(0.25)
    assert summary["pass@1_stderr"] == pytest.approx(0.25 / np.sqrt(3))
    assert summary["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert summary["pass@2_stderr"] == pytest.approx(np.std([1 / 2, 5 / 6, 0], ddof=1) / np.sqrt(3))
    assert summary["avg@4"] == pytest.approx(0.25)
    assert set(summary) == {f"{n}{s}" for n in ("pass@1", "pass@2", "avg@4") for s in ("", "_stderr")}


def test_unscored_samples_are_left_out_and_not_counted_as_wrong():
    summary = summarise([flags("1x"), flags("01"), flags("xx")], [1, 2])
    assert summary["pass@1"] == pytest.approx((1 + 0.5) / 2)  # the third problem has no scored sample
    assert summary["pass@2"] == 1.0  # only the second has two
    assert np.isnan(summary["pass@2_stderr"])
    assert summary["avg@2"] == pytest.approx((1 + 0.5) / 2)


def test_order_of_samples_and_problems_does_not_matter():
    rng = np.random.default_rng(0)
    problems = [rng.choice([0.0, 1.0, NAN], size=8) for _ in range(20)]
    shuffled = [rng.permutation(p) for p in rng.permutation(np.array(problems))]
    first, second = summarise(problems, [1, 2, 4]), summarise(shuffled, [1, 2, 4])
    assert first == pytest.approx(second, rel=1e-12)
    assert first["pass@1"] < first["pass@2"] < first["pass@4"]


def test_one_sample_per_problem_gives_accuracy_with_its_binomial_error():
    summary = summarise([flags("1")] * 30 + [flags("0")] * 70, [1])
    assert summary == pytest.approx({"pass@1": 0.3, "pass@1_stderr": np.sqrt(0.3 * 0.7 / 99)})


def test_nothing_to_estimate_from_is_nan_and_not_zero():
    assert all(np.isnan(v) for v in summarise([flags("xx")], [1]).values())
    assert math.isnan(estimate([], samples=0).value)


# Votes


def vote_by_counting(correct, answers, k):
    """Return the mean over all subsets of k of the share of leading answers that is correct."""
    correct_answers = {a for a, c in zip(answers, correct, strict=True) if c}
    outcomes = []
    for subset in combinations(answers, k):
        counts = Counter(a for a in subset if a != -1)
        leading = [a for a, n in counts.items() if n == max(counts.values())]
        outcomes.append(Fraction(sum(a in correct_answers for a in leading), max(1, len(leading))))
    return float(sum(outcomes) / len(outcomes))


def test_a_vote_worked_by_hand():
    correct, answers = [1, 1, 0, 0, 0], [0, 0, 1, 1, 2]
    assert majority_at_k(correct, answers, 5) == pytest.approx(1 / 2)  # two answers lead
    assert majority_at_k(correct, answers, 3) == pytest.approx(13 / 30)  # 3 subsets won, 4 three-way ties
    assert majority_at_k([1, 0, 0], [0, -1, -1], 3) == 1.0  # a sample without an answer has no vote
    assert majority_at_k([0, 0], [-1, -1], 2) == 0.0  # without any answer the vote is wrong
    assert majority_at_k([1, 0, 0, 0], [0, 1, 2, 3], 4) == pytest.approx(1 / 4)  # all tie


def test_the_expected_vote_is_the_mean_over_all_subsets():
    rng = np.random.default_rng(0)
    for _ in range(60):
        answers = rng.integers(-1, 4, size=int(rng.integers(1, 9))).tolist()
        correct = [float(answer == 0) for answer in answers]
        for k in range(1, len(answers) + 1):
            exact = vote_by_counting(correct, answers, k)
            assert majority_at_k(correct, answers, k) == pytest.approx(exact, abs=1e-12)


def test_a_vote_of_one_or_two_is_the_share_of_right_samples():
    correct, answers = [1, 1, 0, 0, 0], [0, 0, 1, 1, 2]
    assert majority_at_k(correct, answers, 1) == pytest.approx(2 / 5)
    assert majority_at_k(correct, answers, 2) == pytest.approx(2 / 5)


def test_votes_stay_exact_where_binomials_overflow():
    answers = [0] * 1100 + [1] * 900
    assert 0.99 < majority_at_k([float(a == 0) for a in answers], answers, 1000) <= 1.0


def test_the_measures_of_one_problem():
    measures = measures_of_problem(flags("1100x"), [1, 3, 4, 5], [0, 0, 2, 3, 4])
    # The unscored sample has no vote: of 4, the right answer leads with 2. Of 3: {0,0,*} 2 of 4 subsets win,
    # the other two have three answers each.
    expected = {"pass@1": 1 / 2, "pass@3": 1.0, "pass@4": 1.0, "avg@5": 1 / 2, "maj@3": 2 / 3, "maj@4": 1.0}
    assert measures == pytest.approx(expected | {"cons@5": 1.0})
    # without comparable answers
    assert set(measures_of_problem(flags("10"), [1])) == {"pass@1", "avg@2"}
    assert measures_of_problem(flags("xx"), [1], [0, 1]) == {}


def test_a_set_with_an_environment_has_the_share_of_episodes_that_call_a_tool():
    """Of two samples for each of four problems, 2, 1, 0 and 0 call: 3 of 8, error by hand."""

    class Calling(fakes.World):
        async def sample(self, prompt, **request):
            rollouts = await super().sample(prompt, **request)
            if prompt.source == "plain":
                return rollouts
            call = ToolCall("calculator", "1", "1", "timeout", 0.1)
            calls = [(call,) if i < 2 - int(prompt.answer) else () for i in range(len(rollouts))]
            return [dataclasses.replace(r, turns=(Turn(0, 1, "", calls=turn_calls), Turn(0, 1, "")))
                    for r, turn_calls in zip(rollouts, calls, strict=True)]  # fmt: skip

    settings = fakes.config(evaluation={"samples_per_prompt": 2, "k": [1]})
    plain = [dataclasses.replace(p, source="plain") for p in fakes.prompts(4)]
    world, sets = Calling(), [EvalSet("held", fakes.prompts(4)), EvalSet("plain", plain)]
    metrics = run_virtually(lambda: evaluate(settings, world.workers(), sets, world, step=0))
    assert metrics["eval/held/tool_call_share"] == pytest.approx(3 / 8)
    error = (((1 - 0.375) ** 2 + 0.125**2 + 2 * 0.375**2) / 3 / 4) ** 0.5
    assert metrics["eval/held/tool_call_share_stderr"] == pytest.approx(error)
    assert not any("plain/tool_call_share" in name for name in metrics)


def test_the_deadline_of_an_evaluation_is_for_the_next_prompt_and_not_for_the_whole():
    class Slow(fakes.World):
        async def sample(self, prompt, **request):
            await asyncio.sleep(0.5 * int(prompt.answer))
            return await super().sample(prompt, **request)

    async def stuck():
        return "rollout-0 is in sample"

    def evaluate_within(limit_s):
        timeouts = {"timeouts": {"sample_s": limit_s}}
        settings = fakes.config(cluster=timeouts, evaluation={"samples_per_prompt": 1, "k": [1]})
        sets = [EvalSet("held", fakes.prompts(4))]  # done after 0, 0.5, 1 and 1.5 s
        world = Slow()
        return run_virtually(lambda: evaluate(settings, world.workers(), sets, world, step=0, explain=stuck))

    assert "eval/held/pass@1" in evaluate_within(1.2)
    with pytest.raises(TimeoutError, match=r"evaluate: held \(4 prompts\)(.|\n)*rollout-0 is in sample"):
        evaluate_within(0.2)


def test_an_evaluation_whose_prompts_are_scored_after_the_last_sample_meets_its_deadline():
    """As with colocated reward models. Four prompts of 40 s together exceed the 100 s."""

    class InTurns(fakes.World):
        async def sample(self, prompt, **request):
            await asyncio.sleep(40.0 * len(prompt.uid))
            return await super().sample(prompt, **request)

        async def score(self, prompt, rollouts):
            while self.in_flight or len(self.sampled) < 4:
                await asyncio.sleep(1.0)
            return await super().score(prompt, rollouts)

    prompts = [dataclasses.replace(p, uid="x" * i) for i, p in enumerate(fakes.prompts(4), start=1)]
    timeouts = {"timeouts": {"sample_s": 100.0}}
    settings = fakes.config(cluster=timeouts, evaluation={"samples_per_prompt": 1, "k": [1]})
    world, sets = InTurns(jitter=False), [EvalSet("held", prompts)]
    metrics = run_virtually(lambda: evaluate(settings, world.workers(), sets, world, step=0))
    assert metrics["eval/held/unscored"] == 0


class LosesSamples(fakes.World):
    """Loses the samples ``lost``, by problem, as engines do: `least` of them suffice."""

    def __init__(self, lost):
        super().__init__(jitter=False)
        self.lost = lost

    async def sample(self, prompt, *, seeds, sampling):
        kept = await super().sample(prompt, seeds=seeds, sampling=sampling)
        kept = tuple(r for r in kept if r.sample not in self.lost.get(prompt.uid, ()))
        if len(kept) < (len(seeds) if sampling.least is None else sampling.least):
            raise SamplesFailed(f"{len(kept)} of {len(seeds)} samples of {prompt.uid}: environment: OSError")
        return kept

    async def score(self, prompt, rollouts):
        """Score only the first sample as correct; a second reward cannot score the others."""
        group = await super().score(prompt, rollouts)
        return dataclasses.replace(
            group,
            outcomes=tuple("correct" if r.sample == 0 else "wrong" for r in rollouts),
            failures=tuple(() if r.sample == 0 else ("reward mine: OSError",) for r in rollouts),
        )


def test_a_run_whose_evaluation_lacks_a_sample_finishes_and_counts_it_as_unscored():
    prompts = [dataclasses.replace(p, uid=f"held {p.uid}") for p in fakes.prompts(3)]
    evaluation = {"before": False, "after": False, "every": 3, "samples_per_prompt": 4, "k": [1, 4]}
    config, world = fakes.config(evaluation=evaluation), LosesSamples({"held p1": (1,)})
    asyncio.run(run(config, world.workers(), fakes.prompts(40), [EvalSet("held", prompts)], world, world))
    assert len(world.updates) == 6 and world.logged[3]["eval/held/unscored"] == 1
    assert world.logged[3]["eval/held/length_tokens"] == 2  # over the existing samples
    shares = [1 / 4, 1 / 3, 1 / 4]  # over the existing samples
    assert world.logged[3]["eval/held/pass@1"] == pytest.approx(np.mean(shares))
    assert world.logged[3]["eval/held/avg@4"] == pytest.approx(np.mean(shares))
    assert world.logged[3]["eval/held/pass@4"] == 1.0  # the second has no 4, and is excluded
    (group,) = (g for g in world.sampled_groups["eval_held_step_000003"] if g.prompt.uid == "held p1")
    assert [r.finish_reason for r in group.rollouts] == ["stop", "error", "stop", "stop"]
    assert group.outcomes == ("correct", "error", "wrong", "wrong")
    assert np.isnan(group.rewards).tolist() == [False, True, False, False]


def test_a_problem_without_any_sample_is_unscored_and_said(caplog, tmp_path):
    settings = fakes.config(evaluation={"samples_per_prompt": 2, "k": [1]})
    world, sets = LosesSamples({"p1": (0, 1), "p2": (0,)}), [EvalSet("held", fakes.prompts(3))]
    metrics = run_virtually(lambda: evaluate(settings, world.workers(), sets, world, step=0))
    assert metrics["eval/held/unscored"] == 3 and metrics["eval/held/pass@1"] == 0.25  # 1 of 2, and 0 of 1
    assert "0 of 2 samples of p1: environment: OSError; the problem has no samples" in caplog.text
    groups = world.sampled_groups["eval_held_step_000000"]
    assert [[r.finish_reason for r in group.rollouts] for group in groups] == [
        ["stop", "stop"], ["error", "error"], ["error", "stop"],
    ]  # fmt: skip
    write_groups(tmp_path / "held.parquet", groups)
    loaded = read_groups(tmp_path / "held.parquet", {p.uid: p for p in fakes.prompts(3)})
    assert [np.isnan(group.rewards).tolist() for group in loaded] == [[False] * 2, [True] * 2, [True, False]]
    unscored = ((), ("reward mine: OSError",))  # the first of p2 is lost
    assert [group.failures for group in loaded] == [unscored, (), unscored]


def test_mathematically_equal_answers_share_a_number():
    with GraderPool(2, timeout_s=HANG_S) as pool:
        texts = ["so \\boxed{1.50}", "it is 18.", "no idea", "<answer>$x+1$</answer>"]
        assert final_answers(texts, pool) == ["1.50", "18", "", "x+1"]
        answers = ["0.5", "\\frac12", "", "3", "x+1", "3.00", "1+x", "\\frac{6}{2}", "y"]
        correct = [1.0, 1.0] + [0.0] * 7
        assert numbered(answers, correct, pool) == [0, 0, -1, 3, 4, 3, 4, 3, 8]


def test_numbers_and_equal_texts_are_compared_without_a_process():
    no_pool = None  # no process is needed
    answers = ["12", "12.0", "1,200", "1200", "$7$", "\\text{A}", " A", "8"]
    assert numbered(answers[:5], [0.0] * 5, no_pool) == [0, 0, 2, 2, 4]
    assert numbered(answers[5:7], [0.0] * 2, no_pool) == [0, 0]
    assert final_answers(["\\boxed{7}", "\\boxed{3}?</think>\\boxed{4}"], no_pool) == ["7", "4"]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_a_percentage_votes_with_its_share_in_any_order(order: tuple[int, ...]) -> None:
    """The golds 50 and 0.5 both accept 50 %, so equality by golds is not transitive."""
    answers = [("0.5", "50\\%", "50")[i] for i in order]
    with GraderPool(1, timeout_s=HANG_S) as pool:
        numbers = dict(zip(answers, numbered(answers, [0.0] * 3, pool), strict=True))
    assert numbers["0.5"] == numbers["50\\%"] != numbers["50"]


# Intervals


def test_wilsons_interval_has_the_published_numbers():
    # Newcombe 1998 (Stat. Med. 17:857), Table I, method 3: 81/263, 15/148, 0/20, 1/29.
    for correct, count, low, high in (
        (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718),
    ):  # fmt: skip
        assert wilson(correct / count, count) == pytest.approx((low, high), abs=5e-5)


def test_binary_answers_have_wilsons_interval():
    interval = estimate([1.0] * 8 + [0.0] * 2, samples=10)
    assert (interval.low, interval.high) == pytest.approx(wilson(0.8, 10))
    assert interval.stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 9))
    none = estimate([0.0] * 30, samples=480)  # the 16 samples of a problem are one observation
    assert (none.low, none.high) == pytest.approx(wilson(0.0, 30))


def test_problems_with_less_than_binomial_variance_weigh_more_but_never_more_than_their_samples():
    values = [0.25, 0.5, 0.75, 0.5] * 4
    # Student's 97.5 % quantile for 15 degrees of freedom is 2.1314.
    effective = 16 * 0.25 / np.var(values, ddof=1) * (1.95996 / 2.1314) ** 2
    assert (estimate(values, samples=256).low, estimate(values, samples=256).high) == pytest.approx(
        wilson(0.5, effective), rel=1e-4
    )
    assert estimate([0.5] * 4, samples=8).low == pytest.approx(wilson(0.5, 8)[0])


def test_intervals_cover_the_truth_at_their_nominal_rate():
    """30 problems, most of them easy or hard, with 16 samples each, as in AIME."""
    rng, covered, runs = np.random.default_rng(0), 0, 2000
    for _ in range(runs):  # deviation of the share: 0.005
        shares = rng.beta(0.3, 0.7, size=30)
        values = rng.binomial(16, shares) / 16
        interval = estimate(values.tolist(), samples=480)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.938 < covered / runs < 0.967


def test_the_mean_of_sets_counts_small_sets_as_much_as_large_ones():
    large, small = estimate([1.0] * 90 + [0.0] * 10, samples=100), estimate([1.0, 0.0], samples=2)
    mean = mean_of([large, small])
    assert mean.value == pytest.approx((0.9 + 0.5) / 2) and mean.problems == 102
    assert mean.stderr == pytest.approx(math.sqrt(0.9 * 0.1 / 99 + 0.5 * 0.5 / 1) / 2, rel=1e-9)
    nothing = mean_of([estimate([0.0] * 40, samples=40), estimate([0.0] * 10, samples=10)])
    assert nothing.low == 0.0
    assert nothing.high == pytest.approx(math.hypot(wilson(0.0, 40)[1], wilson(0.0, 10)[1]) / 2)


def test_a_set_without_a_right_answer_keeps_its_uncertainty_in_the_mean_of_sets():
    none, most = estimate([0.0] * 30, samples=30), estimate([1.0] * 90 + [0.0] * 10, samples=100)
    mean = mean_of([none, most])
    assert (mean.value, mean.low) == pytest.approx((0.45, 0.45 - (0.9 - 0.8256) / 2), abs=1e-4)
    assert mean.high == pytest.approx(0.45 + math.hypot(0.1135, 0.9448 - 0.9) / 2, abs=1e-4)
    rng, covered, runs = np.random.default_rng(0), 0, 1000
    for _ in range(runs):
        interval = mean_of([
            estimate(rng.binomial(1, share, count).tolist(), samples=count)
            for share, count in ((0.03, 30), (0.9, 500))
        ])  # fmt: skip
        covered += interval.low <= (0.03 + 0.9) / 2 <= interval.high
    assert 0.93 < covered / runs < 0.97  # 0.74 from the two standard errors alone
