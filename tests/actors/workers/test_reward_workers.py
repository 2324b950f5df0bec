"""Reward workers and reward model workers as real actors: samples in, scored groups out."""

import asyncio
import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from actors.cluster import Cluster
from actors.lifecycle.team import ActorSpec
from actors.workers.reward import RewardModelPool, RewardPool, RewardWorker
from grpo_dist.config import Config, ModelConfig, RestartsConfig, RewardsConfig
from grpo_dist.demo.tokenizer import END, character_tokenizer
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Prompt, Rollout, Sampling, ToolCall, Turn
from tests.support.patience import HANG_S
from tests.support.reward_models import BY_HAND, by_hand

pytestmark = pytest.mark.machine

ACTORS = ActorSpec({"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(1)}})
PROMPT = Prompt("p", np.array([1], np.int32), "2", "test", "1+1")
TEXTS = ["1\n\n\\boxed{2}", "3\n\n\\boxed{2}", "1\n\n\\boxed{3}"]


def rollouts(texts):
    tokenizer = character_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    samples = []
    for i, text in enumerate(texts):
        ids = np.array([*tokenizer(text)["input_ids"], end], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        samples.append(Rollout("p", i, ids, zeros.astype(np.float32), "stop", text, zeros))
    return tuple(samples)


def rewards_of(code_path, *functions):
    """Return the configuration of reward functions, with modules in ``code_path``."""
    sections = {"processes_per_worker": 1, "functions": list(functions), "code_paths": [str(code_path)]}
    return RewardsConfig.model_validate(sections)


@pytest.fixture(scope="module")
def groups(ray_cluster, tiny_model, tmp_path_factory):
    """Two groups, scored by functions, an outcome model and a process model of two workers, at once."""
    directory = tmp_path_factory.mktemp("models")
    settings = RewardsConfig.model_validate(
        {
            "processes_per_worker": 1,
            "functions": [
                {"function": "math"},
                {"function": "overlong", "kwargs": {"buffer_tokens": 20}, "weight": 0.5, "gate": "math"},
            ],
            "models": [
                {
                    "name": "quality", "path": by_hand(directory / "o", "outcome", template=False),
                    "weight": 0.25, "gate": "math",
                },
                {
                    "name": "steps", "path": by_hand(directory / "p", "classifier"), "kind": "classifier",
                    "step_mark": "", "reduce": "last", "num_workers": 2, "weight": 2.0,
                },
            ],
        }
    )  # fmt: skip

    async def run():
        models = [
            RewardModelPool(m, ACTORS, policy=ModelConfig(path="x"), policy_dir=str(tiny_model))
            for m in settings.models
        ]
        pool = RewardPool(settings, ACTORS, max_new_tokens=24, models=models)
        await asyncio.gather(pool.ready(), *(model.ready() for model in models))
        try:
            return await asyncio.gather(*(pool.score(PROMPT, rollouts(TEXTS[:n])) for n in (3, 1)))
        finally:
            await pool.shutdown()

    return asyncio.run(run())


def test_functions_and_models_combine_into_one_reward(groups):
    """Completions of 6 tokens: 1, 2 line breaks, the box of \\boxed{, 2, }, and EOS make 7; 4 are free of
    punishment, so overlong is -(7 - 4) / 20. quality is read at "}": 0. steps at "}": 0, too.
    """
    group = groups[0]
    assert [len(r.completion_ids) for r in group.rollouts] == [7, 7, 7]
    assert list(group.reward_parts) == ["math", "overlong", "quality", "steps"]
    assert group.reward_parts["overlong"] == pytest.approx([-0.15] * 3)
    assert group.reward_parts["quality"] == pytest.approx([0.0] * 3)
    assert group.reward_parts["steps"] == pytest.approx([0.0] * 3)
    assert group.rewards == pytest.approx([0.925, 0.925, 0.0])
    assert group.outcomes == ("correct", "correct", "wrong")


def test_step_rewards_arrive_with_the_group(groups):
    scores = [steps.tolist() for steps in groups[0].step_rewards]
    assert [s[0] for s in scores] == pytest.approx([BY_HAND["1"], BY_HAND["3"], BY_HAND["1"]])
    assert [ends.tolist() for ends in groups[0].step_ends] == [[2, 6]] * 3
    assert len(groups[1].step_rewards) == 1


def test_step_rewards_survive_a_table(groups, tmp_path):
    write_groups(tmp_path / "g.parquet", [groups[0]])
    (back,) = read_groups(tmp_path / "g.parquet", {"p": PROMPT})
    for name in ("step_rewards", "step_ends"):
        ours, theirs = getattr(groups[0], name), getattr(back, name)
        assert [a.dtype for a in ours] == [b.dtype for b in theirs]
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_cluster_starts_reward_models_with_its_samplers_and_ends_them(ray_cluster, tiny_model, tmp_path):
    """The engine's random model solves nothing; the process model scores whatever it samples."""
    model = {"name": "steps", "path": by_hand(tmp_path, "classifier"), "kind": "classifier", "weight": 2.0}
    config = Config.model_validate(
        {
            "model": {"path": "demo:tiny"},
            "data": {"train": [{"path": "demo:add3"}]},
            "sampling": {"max_new_tokens": 8},
            "rollout": {"kv_cache_gib": 0.25, "enforce_eager": True, "threads": 1},
            "rewards": {"models": [model]},
        }
    )

    async def run():
        async with Cluster(config) as cluster:
            samplers = await cluster.start_evaluation(tiny_model)
            assert ray.get_actor("reward-model-steps-0")
            sampled = await samplers.rollouts.sample(
                PROMPT, seeds=[1, 2], sampling=Sampling(max_new_tokens=8)
            )
            return await samplers.rewards.score(PROMPT, sampled)

    group = asyncio.run(run())
    assert group.reward_parts["steps"] == pytest.approx([BY_HAND["\n"]] * 2)
    assert group.rewards == pytest.approx(group.reward_parts["math"] + 2.0 * BY_HAND["\n"])
    assert [ends[-1] for ends in group.step_ends] == [len(r.completion_ids) - 1 for r in group.rollouts]
    assert _gone("reward-model-steps-0")


class Handle:
    """A fake handle of a worker in this process."""

    def __init__(self, worker):
        self.submit, self.collect = (SimpleNamespace(remote=c) for c in (worker.submit, worker.collect))


def test_the_driver_logs_once_why_samples_have_no_score(tmp_path, caplog):
    """Two workers fail for the same reason; an actor's own log has no reader."""
    (tmp_path / "failing_rewards.py").write_text(
        "def fails(completion, answer):\n    raise OSError('no disk')\n"
    )
    settings = rewards_of(tmp_path, {"name": "mine", "function": "failing_rewards:fails"})
    workers = [RewardWorker(settings, max_new_tokens=24) for _ in range(2)]
    handles = [Handle(worker) for worker in workers]
    in_turn = itertools.cycle(range(2))

    class InTurn:
        async def send(self, call, *, attempts):
            return await call(handles[next(in_turn)])

    async def scored():
        return [await pool.score(PROMPT, rollouts(TEXTS)) for _ in range(4)]

    pool = object.__new__(RewardPool)
    pool.team, pool.models, pool._lines, pool._logged = InTurn(), [], {}, set()
    with caplog.at_level("WARNING"):
        groups = asyncio.run(scored())
    for worker in workers:
        worker.close()
    assert all(np.isnan(group.rewards).all() for group in groups)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "grpo_dist"]
    place = f"{tmp_path}/failing_rewards.py:2 in fails"
    assert message == f"reward mine: OSError: no disk ({place}); unscored samples are excluded"


def test_a_group_that_kills_its_workers_costs_no_other_group_its_score(ray_cluster, tmp_path, caplog):
    (tmp_path / "deadly_rewards.py").write_text(
        "import os, signal\n"
        "def length(completion):\n"
        "    if completion == 'poison':\n"  # the grader's guardian is a child of the worker
        "        worker = open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]\n"
        "        os.kill(int(worker), signal.SIGKILL)\n"
        "    return float(len(completion))\n"
    )
    settings = rewards_of(tmp_path, {"name": "mine", "function": "deadly_rewards:length"})

    async def scored():
        restarts = RestartsConfig(backoff_s=0.05, hang_s=HANG_S)
        pool = RewardPool(settings, replace(ACTORS, restarts=restarts, start_s=HANG_S), max_new_tokens=24)
        await pool.ready()
        try:
            async with asyncio.timeout(HANG_S):
                texts = [["a"], ["bc", "poison"], ["def"], ["g"]]
                prompts = [replace(PROMPT, uid=group[-1]) for group in texts]
                groups = [pool.score(p, rollouts(group)) for p, group in zip(prompts, texts, strict=True)]
                return await asyncio.gather(*groups), pool.team.restarted()
        finally:
            await pool.shutdown()

    with caplog.at_level("WARNING"):
        groups, restarted = asyncio.run(scored())
    np.testing.assert_array_equal(np.concatenate([g.rewards for g in groups]), [1, np.nan, np.nan, 3, 1])
    assert restarted == 2
    lost = [record.getMessage() for record in caplog.records if "workers were lost" in record.getMessage()]
    assert len(lost) == 1 and lost[0].startswith("reward: 2 workers were lost over prompt poison (")


def test_episodes_are_scored_with_their_turns_and_ends_and_a_failed_environment_is_reported(
    ray_cluster, tmp_path, caplog
):
    (tmp_path / "turn_rewards.py").write_text("def calls(turns):\n    return float(len(turns[0]['calls']))\n")
    calls = {"name": "calls", "function": "turn_rewards:calls", "weight": 0.25}
    settings = rewards_of(tmp_path, {"function": "environment"}, calls)
    call = ToolCall("python", "1+1", "2", "ok", 0.1)
    turn = Turn(0, 3, "so: 2", "the service is down", (call,), 1.0)
    ends = ("stop", "turns", "error")
    episodes = tuple(
        replace(r, turns=(turn,), finish_reason=end) for r, end in zip(rollouts(TEXTS), ends, strict=True)
    )

    async def scored():
        pool = RewardPool(settings, ACTORS, max_new_tokens=24, outcome_rewards={"turns": -0.5})
        await pool.ready()
        group = await pool.score(PROMPT, episodes)
        await pool.shutdown()
        return group

    with caplog.at_level("WARNING"):
        group = asyncio.run(scored())
    np.testing.assert_array_equal(group.rewards, [1.25, 0.75, np.nan])
    assert group.rollouts[1].turns == (turn,) and group.outcomes == ("", "", "")
    (message,) = [record.getMessage() for record in caplog.records if "service" in record.getMessage()]
    assert message == "reward environment: the service is down; unscored samples are excluded"


def _gone(actor):
    """Return whether no actor of that name is alive, after a wait of at most ``HANG_S``."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        try:
            ray.get_actor(actor)
        except ValueError:
            return True
        time.sleep(0.2)
    return False
