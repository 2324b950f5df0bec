"""Episodes of an evaluation: their turns, calls and ends in verdicts, result.json, tables and the report."""

import asyncio
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from grpo_dist.config import RewardsConfig
from grpo_dist.evaluation.result import JudgedProblem, Verdict, episode_figures, measure
from grpo_dist.evaluation.sampling import Draw, EvalSet, add_missing, evaluate
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.runs.training_cluster import Notes
from grpo_dist.tools.evaluate.result import EvaluationResult, make_verdict, print_measured
from grpo_dist.tools.evaluate.store import Identity
from grpo_dist.types import Group, Prompt, Rollout, Sampling
from tests.support import fakes
from tests.support.made_episodes import episodes, ids_of

IDENTITY = Identity("sft", "f", {"evaluation": {"samples_per_prompt": 4}}, "d")


def plain(uid="q"):
    """A group without an environment."""
    ids = ids_of("\\boxed{6}")
    zeros = np.zeros(len(ids), np.float32)
    rollouts = tuple(
        Rollout(uid, i, ids, zeros, "stop", "\\boxed{6}", np.zeros(len(ids), np.int32)) for i in range(4)
    )
    ones = np.ones(4, np.float32)
    prompt = Prompt(uid, ids_of("2*3="), "6", "sums", "2*3=")
    return Group(prompt, rollouts, ones, {"math": ones}, ("correct",) * 4)


def judge(*groups):
    with GraderPool(1) as pool:
        originals = [make_verdict(group, RewardsConfig(), pool) for group in groups]
    verdicts = [Verdict(**json.loads(json.dumps(asdict(verdict)))) for verdict in originals]
    return [
        JudgedProblem.from_verdict(group.prompt.source, group.prompt, {}, verdict, (1,))
        for group, verdict in zip(groups, verdicts, strict=True)
    ]


def test_turns_calls_and_ends_of_each_sample_are_part_of_its_problems_verdict():
    first, other = judge(episodes(), plain())
    assert first.verdict.episodes == {
        "turns": [2, 1, 2, 2], "calls": [1, 0, 0, 1], "errors": [0, 0, 0, 1],
        "ends": ["stop", "stop", "stop", "turns"],
    }  # fmt: skip
    assert other.verdict.episodes is None


def test_samples_that_the_engines_gave_up_are_no_episodes_as_in_an_evaluation_of_training():
    whole, source = episodes(), episodes("q")
    indices = (1, 3)
    partial = replace(
        source, rollouts=tuple(source.rollouts[i] for i in indices), rewards=source.rewards[[*indices]],
        reward_parts={"math": source.rewards[[*indices]]}, outcomes=("wrong", "wrong"),
    )  # fmt: skip
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=512)
    padded = add_missing(partial, Draw(sampling, samples=4, seed=0, sample_s=10.0))
    assert len(padded.rollouts) == 4 and padded.rollouts[0].finish_reason == "error"
    result = EvaluationResult.from_problems(IDENTITY, judge(whole, padded))
    (figures,) = (m.episodes for m in result.measured if m.by is None)
    assert (figures.episodes, figures.turns, figures.tool_calls) == (6, 10 / 6, 3 / 6)
    assert figures.ends == {"stop": 4 / 6, "turns": 2 / 6}

    class Scripted:
        async def sample(self, prompt, **request):
            return prompt.uid

        async def score(self, prompt, rollouts):
            return {"p": whole, "q": partial}[rollouts]

    workers = SimpleNamespace(rollouts=Scripted(), rewards=Scripted())
    config = fakes.config(evaluation={"samples_per_prompt": 4, "k": [1]})
    sets = [EvalSet("products", [whole.prompt, partial.prompt])]
    training = asyncio.run(evaluate(config, workers, sets, Notes(), step=0))
    share = "eval/products/tool_call_share"
    assert result.metrics()[share] == training[share] == figures.tool_call_share.value == 0.5


def test_figures_are_means_over_episodes_with_an_interval_over_problems():
    def episode_counts(*columns):
        return dict(zip(("turns", "calls", "errors", "ends"), columns, strict=True))

    figures = episode_figures([
        episode_counts((3, 1), (0, 2), (0, 1), ("stop", "turns")),
        episode_counts((2, 2), (1, 1), (0, 0), ("stop", "error")),
    ])  # fmt: skip
    assert (figures.episodes, figures.turns, figures.tool_calls) == (4, 2.0, 1.0)
    assert figures.tool_error_share == 0.25 and figures.ends == {"error": 0.25, "stop": 0.5, "turns": 0.25}
    share = figures.tool_call_share
    assert (share.value, share.problems) == (0.75, 2) and share.stderr == pytest.approx(0.25)
    assert share.low < 0.75 < share.high
    silent = episode_figures([episode_counts((1,), (0,), (0,), ("length",))])
    assert silent.tool_error_share == 0.0 and silent.tool_call_share.value == 0.0
    assert episode_figures([]) is None


def test_result_json_has_the_figures_of_sets_with_an_environment_alone(tmp_path: Path):
    result = EvaluationResult.from_problems(IDENTITY, judge(episodes(), plain()))
    result.write(tmp_path)
    by_set = {m["set"]: m for m in json.loads((tmp_path / "result.json").read_text())["measured"]}
    figures = by_set["products"]["episodes"]
    names = ("episodes", "turns", "tool_calls", "tool_error_share")
    assert tuple(figures[name] for name in names) == (4, 1.75, 0.5, 0.5)
    assert figures["tool_call_share"]["value"] == 0.5 and figures["ends"] == {"stop": 0.75, "turns": 0.25}
    assert by_set["sums"]["episodes"] is None
    assert by_set["all problems"]["episodes"] == figures, "over the episodes among all samples"
    metrics = result.metrics()
    assert metrics["eval/products/tool_call_share"] == 0.5
    assert "eval/sums/tool_call_share" not in metrics


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_of_episodes_is_complete_at_every_width(width):
    def printed(*groups):
        console = Console(file=io.StringIO(), width=width, highlight=False)
        print_measured(console, "m", list(measure(judge(*groups))))
        return console.file.getvalue()

    text = printed(episodes(), plain())
    assert "…" not in text
    for cell in ("episodes", "1.8", "0.50", "50.0 [", "50%", "stop 75%, turns 25%"):
        assert cell in text, cell
    assert "failed calls" not in printed(plain())
