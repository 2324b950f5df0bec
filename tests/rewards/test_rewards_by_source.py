"""Rewards per source: what scores which sample, and the metrics and advantages."""

import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from actors.workers.reward import RewardWorker, not_scored
from grpo_dist.batch.credit_assignment import sample_advantages
from grpo_dist.config import RewardsConfig, SamplingConfig
from grpo_dist.loop.metrics import rollout_metrics
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.rewards.checks import combination_problems, reward_problems
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.served import LLMJudge
from grpo_dist.runs.prepare import check_scoring
from grpo_dist.tools.evaluate.completions import Columns, read_completions
from grpo_dist.tools.evaluate.score import score_completions
from grpo_dist.types import Prompt, Rollout
from tests.support import fakes
from tests.support.losses import credit
from tests.support.made_groups import group_of
from tests.support.patience import HANG_S
from tests.support.services import StandIn, replied
from tests.support.tiers import slow_after

SETTINGS = RewardsConfig.model_validate({
    "functions": [{"function": "math", "weight": 2}],
    "models": [{"name": "helpful", "path": "a"}, {"name": "safe", "path": "b"}],
    "by_source": {
        "words": {"functions": [{"function": "exact"}, {"name": "half", "function": "random", "weight": 0}]},
        "chat": {"models": ["helpful"]},
    },
    "num_workers": 1, "processes_per_worker": 1, "timeout_s": HANG_S,
})  # fmt: skip


def test_a_source_has_its_own_rewards_or_the_default():
    def names(source):
        rewards = SETTINGS.select_source(source)
        return [f.label for f in rewards.functions], [m.name for m in rewards.models]

    assert names("words") == (["exact", "half"], [])
    assert names("chat") == ([], ["helpful"])
    assert names("anything") == (["math"], ["helpful", "safe"])
    assert SETTINGS.names == ["math", "exact", "half", "helpful", "safe"]
    assert SETTINGS.weights == {"math": 2, "exact": 1, "half": 0, "helpful": 1, "safe": 1}


@pytest.mark.parametrize(
    ("by_source", "message"),
    [
        ({"a": {}}, r"by_source\.a: .*no functions and no models"),
        ({"a": {"models": ["x"]}}, r"by_source\.a\.models = x: no such model; `rewards\.models` has: none"),
        ({"a": {"functions": [{"function": "exact"}] * 2}}, r"by_source\.a: .*two rewards share a name"),
        ({"a": {"functions": [{"function": "exact", "gate": "math"}]}}, r"by_source\.a: .*gate = math"),
        ({"a": {"functions": [{"name": "math", "function": "exact"}]}}, "reward math is not the same in all"),
    ],
)
def test_contradictory_rewards_by_source_are_refused(by_source, message):
    with pytest.raises(ValidationError, match=message):
        RewardsConfig.model_validate({"by_source": by_source})


EXACT = {"functions": [{"function": "exact"}]}
OWN_STEPS = {"functions": [{"function": "my_rewards:steps", "kind": "process"}]}
STEPS = [{"name": "steps", "path": "p", "kind": "classifier"}]
STEP_ESTIMATOR = {"algorithm": {"advantage": "process"}}


@pytest.mark.parametrize(
    ("rewards", "changes", "message"),
    [
        ({"by_source": {"b": EXACT}}, {}, "has b, but no source.*one of a"),
        ({"functions": [], "by_source": {"a": EXACT}},
         {"data": {"train": [{"path": "a.jsonl"}], "eval": [{"path": "e.jsonl"}]}},
         "source e has no rewards"),
        ({"by_source": {"a": {"functions": [{"function": "math", "weight": 3}]}}},
         {"algorithm": {"advantage": "gdpo"}}, r"gdpo uses one weight of reward math.*\[1\.0, 3\.0\]"),
        ({"by_source": {"a": {"functions": [{"function": "math"}]}}, "models": STEPS}, STEP_ESTIMATOR,
         r"`rewards\.by_source\.a` has no rewards of steps"),
        ({"by_source": {"a": OWN_STEPS}},
         STEP_ESTIMATOR | {"data": {"train": [{"path": "a.jsonl", "environment": "calculator"}]}},
         r"`rewards\.by_source\.a` has a reward of steps.*source a makes episodes"),
        ({"by_source": {"a": OWN_STEPS}},
         STEP_ESTIMATOR | {"data": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}},
         "no rewards of steps, and source b of"),
    ],
)  # fmt: skip
def test_rewards_that_do_not_fit_the_data_or_the_estimator_are_refused(rewards, changes, message):
    with pytest.raises(ValidationError, match=message):
        fakes.config(rewards=rewards, **({"data": {"train": [{"path": "a.jsonl"}]}} | changes))


@pytest.mark.parametrize(
    ("rewards", "environment"),
    [
        ({"by_source": {"a": OWN_STEPS}}, None),  # every source has steps, though the default has none
        ({"functions": OWN_STEPS["functions"], "by_source": {"b": EXACT}}, "calculator"),  # b has turns
    ],
)
def test_step_rewards_are_asked_of_each_source_by_its_own_rewards(rewards, environment):
    sources = [{"path": "a.jsonl"}]
    if environment:
        sources.append({"path": "b.jsonl", "environment": environment})
    config = fakes.config(data={"train": sources}, rewards=rewards, algorithm={"advantage": "process"})
    assert config.rewards.select_source("a").scores_steps


def test_functions_of_every_source_are_checked_and_found(tmp_path):
    (tmp_path / "graders_of_a_user.py").write_text("def short(completion):\n    return -len(completion)\n")
    functions = [{"function": "graders_of_a_user:short"}, {"function": "numeric", "kwargs": {"relative": -1}}]
    judge = {"function": "judge", "kwargs": {"base_url": "http://x", "model": "m"}}
    by_source = {"a": {"functions": functions}, "b": {"functions": [judge]}}
    settings = RewardsConfig.model_validate({"code_paths": [str(tmp_path)], "by_source": by_source})
    without_judge = settings.model_copy(update={"by_source": {"a": settings.by_source["a"]}})
    problems = list(reward_problems(without_judge, max_new_tokens=8))
    assert any(p.startswith("rewards.by_source.a.functions numeric: kwargs.relative = -1") for p in problems)
    assert [f.label for f in settings.select_source("b").functions] == ["judge"]


@pytest.mark.parametrize("length", slow_after(["cosine_length", "relative_length"], 1))
def test_a_length_reward_by_the_math_grader_is_refused_for_code(length):
    """It would punish code that passes as wrong, and evaluations would count it as wrong."""
    code = [{"function": "unit_tests"}, {"function": length}]

    def problems(**settings):
        return list(combination_problems(RewardsConfig.model_validate(settings)))

    (problem,) = problems(functions=code)
    assert problem.startswith(f"rewards.functions {length} asks the math grader")
    assert "`overlong` with `gate: unit_tests`" in problem
    math = [{"function": "math"}]
    (problem,) = problems(functions=math, by_source={"code": {"functions": code}})
    assert problem.startswith(f"rewards.by_source.code.functions {length}")
    assert problems(functions=[*code, *math]) == problems(functions=[{"function": length}]) == []
    with pytest.raises(ValueError, match="asks the math grader"):
        check_scoring(RewardsConfig.model_validate({"functions": code}), SamplingConfig())


def test_length_rewards_know_what_the_longest_sequence_leaves_after_a_prompt():
    overlong = {"function": "overlong", "kwargs": {"buffer_tokens": 4}}
    worker = RewardWorker(
        RewardsConfig.model_validate({"functions": [overlong]}), max_new_tokens=24, max_length=20
    )
    sample = Rollout(
        "p", 0, np.zeros(10, np.int32), np.zeros(10, np.float32), "length", "x", np.zeros(10, np.int32),
        max_new_tokens=24,
    )  # fmt: skip
    try:
        for size, reward in ((10, -1), (8, -0.5), (2, 0)):  # cut off after a prompt of 10 tokens
            prompt = Prompt("p", np.zeros(size, np.int32), "4", "sums")
            group, _ = worker.score(prompt, [sample], {})
            assert group.rewards.tolist() == [reward]
    finally:
        worker.close()


def test_a_worker_scores_each_source_by_its_own_functions():
    worker = RewardWorker(SETTINGS.model_copy(update={"models": ()}), max_new_tokens=24)
    ids = np.array([5, 2], np.int32)

    def score(source, answer, *texts):
        rollouts = [
            Rollout("p", i, ids, np.zeros(2, np.float32), "stop", text, np.zeros(2, np.int32))
            for i, text in enumerate(texts)
        ]
        group, _ = worker.score(Prompt("p", ids, answer, source), rollouts, {})
        return group

    try:
        sums = score("sums", "4", "\\boxed{4}", "\\boxed{5}")
        assert sums.rewards.tolist() == [2, 0] and list(sums.reward_parts) == ["math"]
        assert sums.outcomes == ("correct", "wrong")
        words = score("words", "four", "<answer>four</answer>", "\\boxed{4}")
        assert words.rewards.tolist() == [1, 0] and list(words.reward_parts) == ["exact", "half"]
        assert words.outcomes == ("", "")
        lost = not_scored(Prompt("p", ids, "four", "words"), sums.rollouts, SETTINGS)
        assert list(lost.reward_parts) == ["exact", "half"] and np.isnan(lost.rewards).all()
    finally:
        worker.close()


# --- metrics and advantages of groups with different rewards


def groups():
    one = group_of([1, 0], [3, 3], parts={"math": np.array([1, 0], np.float32)})
    parts = {"exact": np.array([0.5, np.nan], np.float32), "safe": np.array([0, 2], np.float32)}
    other = group_of([0.5, 2], [3, 3], parts=parts)
    named = replace(other, prompt=replace(other.prompt, uid="q"))
    return [one, replace(named, rollouts=tuple(replace(r, prompt_uid="q") for r in named.rollouts))]


def test_a_metric_is_the_mean_over_the_samples_that_have_the_reward():
    metrics = rollout_metrics(groups(), version=0)
    assert (metrics["reward/math"], metrics["reward/exact"], metrics["reward/safe"]) == (0.5, 0.5, 1.0)
    assert metrics["reward/exact_unscored"] == 1.0 and metrics["reward/math_unscored"] == 0.0


def test_samples_are_read_back_with_the_rewards_they_had(tmp_path):
    written = groups()
    why = ((), ("reward exact: KeyError: 'x' (mine.py:2 in exact)",))
    unscored = np.array([0.5, np.nan], np.float32)
    written[1] = replace(written[1], rewards=unscored, failures=why)
    write_groups(tmp_path / "g.parquet", written)
    table = pq.read_table(tmp_path / "g.parquet")
    assert table["failures"].to_pylist() == [[], [], [], list(why[1])]
    # The tokens of the prompt are stored once per group.
    assert [ids is not None for ids in table["prompt_ids"].to_pylist()] == [True, False, True, False]
    restored = read_groups(tmp_path / "g.parquet", {g.prompt.uid: g.prompt for g in written})
    for before, after in zip(written, restored, strict=True):
        assert list(before.reward_parts) == list(after.reward_parts)
        assert after.failures == before.failures
        for name, part in before.reward_parts.items():
            np.testing.assert_array_equal(part, after.reward_parts[name])


def test_gdpo_takes_each_reward_where_a_source_has_it():
    """A group without the math reward changes no advantage of the group with it."""
    one, other = groups()
    equal = np.full(2, 0.5, np.float32)
    other = replace(other, rewards=equal, reward_parts={"exact": equal})
    settings = credit("gdpo", weights={"math": 1.0, "exact": 1.0})
    mine, theirs = sample_advantages([one, other], settings)
    assert mine[0] == -mine[1] > 0 and theirs.tolist() == [0, 0]


JUDGE = {"function": "judge", "kwargs": {"base_url": "http://x", "model": "m", "requests_per_minute": 60}}
JUDGED = RewardsConfig.model_validate({
    "functions": [{"function": "math"}],
    "by_source": {
        "prose": {"functions": [JUDGE]},
        "proofs": {"functions": [JUDGE | {"weight": 0.5}, {"function": "math"}]},
        "sums": {"functions": [{"function": "exact"}]},
        "words": {"functions": [{"function": "exact"}]},
    },
    "num_workers": 3, "processes_per_worker": 1, "timeout_s": HANG_S,
})  # fmt: skip


@pytest.fixture
def rates(monkeypatch):
    """Return the requests per minute of each connection to a judge."""
    per_connection = []

    def connect(self, workers):
        per_connection.append(self.requests_per_minute / workers)

    monkeypatch.setattr(LLMJudge, "_connect", connect)
    monkeypatch.setattr(LLMJudge, "close", lambda self: None)
    return per_connection


@pytest.mark.machine
def test_the_rate_limit_of_a_run_is_shared_by_the_scorers_that_have_the_reward(rates):
    """Two of five variants have it, in each of three workers."""
    worker = RewardWorker(JUDGED, max_new_tokens=10)
    worker.close()
    assert rates == [10.0, 10.0] and sum(rates) * JUDGED.num_workers == 60


@pytest.mark.machine
@pytest.mark.parametrize(("sources", "rate"), [(["prose"], 60.0), (["prose", "sums", "proofs"], 30.0)])
def test_the_rate_limit_holds_over_all_scorers_of_completions(rates, sources, rate, tmp_path):
    rows = [{"answer": "7", "completion": "\\boxed{7}", "source": source} for source in sources]
    file = tmp_path / "rows.jsonl"  # right answers, so that no judge is asked
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    completions = read_completions(file, Columns())
    with GraderPool(2) as pool:
        score_completions(completions, JUDGED, None, pool, max_new_tokens=10, processes=2)
    assert rates == [rate] * len(rates) and sum(rates) == 60


@pytest.mark.machine
@pytest.mark.slow
def test_as_many_groups_wait_for_servers_at_once_as_max_concurrency_allows(tmp_path):
    """Five groups of two sources, on one grader process: each reply waits for the requests of all groups."""
    arrived = threading.Barrier(5)

    def reply(body, number):
        arrived.wait(HANG_S)
        return replied([1.0])

    rows = [{"answer": "7", "completion": "7", "source": source} for source in ("a", "a", "a", "b", "b")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"problem": str(i)}) + "\n" for i, row in enumerate(rows)))
    completions = read_completions(file, Columns())
    with StandIn(reply) as server, GraderPool(1) as pool:
        kwargs = {"url": server.base_url, "timeout_s": HANG_S, "max_concurrency": 3}
        source = {"functions": [{"function": "remote", "kwargs": kwargs}]}
        settings = RewardsConfig.model_validate(
            {"by_source": {"a": source, "b": source}, "processes_per_worker": 1}
        )
        scored = score_completions(completions, settings, None, pool, max_new_tokens=10, processes=1)
        worker = RewardWorker(settings, max_new_tokens=10)
        requests = [(i, (item.prompt, (item.rollouts, None), {})) for i, item in enumerate(completions)]

        async def answers():
            await worker.submit(requests)
            collected = []
            while len(collected) < len(requests):
                collected += await worker.collect()
            return [np.frombuffer(scores[0], np.float32).tolist() for _, (scores, _) in collected]

        rewards = asyncio.run(answers())
        worker.close()
    assert [group.rewards.tolist() for group in scored.groups] == rewards == [[1.0]] * 5
