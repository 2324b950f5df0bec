"""Each example of `guides/write_your_own.md` works as documented."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from grpo_dist.config import Config, DataConfig, DataSourceConfig, EnvironmentsConfig
from grpo_dist.data.readers import read
from grpo_dist.data.tasks import environment_problems
from grpo_dist.environments.episode import Generation
from grpo_dist.environments.user_rollout import UserRollout
from grpo_dist.loop.metrics import user_metric
from grpo_dist.observe.tracker import Tracker
from grpo_dist.plugins import algorithm, user_code
from grpo_dist.plugins.inputs import (
    AdvantageInputs,
    AggregationInputs,
    MetricInputs,
    OrderInputs,
    PolicyLossInputs,
)
from grpo_dist.plugins.user_code import ORDER, ROLLOUT, Kind, load
from grpo_dist.runs.trials import user_code_problems
from grpo_dist.types import Sampling
from tests.support import fakes
from tests.support.documents import ROOT, blocks
from tests.support.made_groups import group_of

KINDS = [kind for kind in vars(user_code).values() if isinstance(kind, Kind)]
GUIDE = ROOT / "grpo_dist/guides/write_your_own.md"
EXAMPLES = [block.text for block in blocks(GUIDE) if block.file == "my_components.py"]
(SHOWN,) = [yaml.safe_load(block.text) for block in blocks(GUIDE) if block.language == "yaml"]


class Letters:
    """A tokenizer with a token per letter."""

    def __len__(self):
        return 128

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("guide")
    (directory / "my_components.py").write_text("\n\n".join(EXAMPLES))
    return str(directory)


def test_every_kind_has_an_example_in_the_guide():
    assert len(EXAMPLES) == len(KINDS) - 2 == 9  # rewards and environments have separate guides
    text = GUIDE.read_text()
    for kind in KINDS:
        assert f"`{kind.group}`" in text


def test_the_configuration_of_the_guide_names_all_pieces_and_passes_the_trials(code):
    base = fakes.config().model_dump(mode="json")
    sections = SHOWN | {"data": base["data"] | SHOWN["data"], "code_paths": [code]}
    config = Config.model_validate(base | sections)
    assert len(config.user_components) == 9
    assert list(user_code_problems(config.user_components, config.code_paths, Letters())) == []


def test_the_estimator(code):
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, torch.nan], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1])
    inputs = AdvantageInputs(rewards, ids, torch.ones(5), torch.zeros(5, dtype=torch.bool), {}, {})
    user_code = algorithm.UserCode([code], {"advantage": {"scale": 2.0}})
    advantages = algorithm.user_advantages("my_components:median", user_code, inputs)
    assert advantages.tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]


def test_the_loss(code):
    logprobs = torch.tensor([[0.5, 0.0]], requires_grad=True)
    zero, mask = torch.zeros(1, 2), torch.tensor([[True, False]])
    inputs = PolicyLossInputs(logprobs, zero, zero, torch.tensor([[2.0, 9.0]]), mask)
    losses, _ = algorithm.user_policy_loss("my_components:squared", algorithm.UserCode([code]), inputs)
    assert losses.tolist() == [[pytest.approx(-2 * np.exp(0.5) + 0.1 * 0.25), 0.0]]


def test_the_kl_and_the_aggregation(code):
    user_code, logprobs = algorithm.UserCode([code]), torch.tensor([[1.0, 3.0]])
    kl = algorithm.kl_estimate("my_components:absolute", user_code, logprobs, torch.tensor([[2.0, 1.0]]))
    assert kl.tolist() == [[1.0, 2.0]]
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    inputs = AggregationInputs(
        torch.full((2, 4), 3.0), mask, 5.0, 2.0, 8, torch.tensor([4, 1]), 1.0, torch.tensor([5, 5])
    )
    loss = algorithm.user_aggregation("my_components:by_root_length", user_code, inputs)
    assert loss.item() == (12 / 2 + 3) / 2


def test_the_metric(code):
    groups = [group_of([1.0, 0.0], [1, 2]), group_of([0.5, 0.5], [1, 2])]
    metrics = user_metric("my_components:spread", (code,), {}, MetricInputs(3, groups, {}), "spread")
    assert metrics == {"user/spread": 0.5}


def test_the_sink(code, tmp_path):
    quiet = {"console": False, "tensorboard": False}
    sinks = [{"function": "my_components:Lines", "kwargs": {"file": "own.txt"}}]
    config = fakes.config(code_paths=[code], tracking=quiet | {"sinks": sinks})
    with Tracker(config, tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert (tmp_path / "own.txt").read_text() == "1 reward/mean 0.5\n"


def test_the_data_source(code):
    source = DataSourceConfig(path="my_components:sums", kwargs={"count": 3}, max_rows=2)
    problems = environment_problems(DataConfig(train=(source,)), EnvironmentsConfig(code_paths=(code,)))
    rows = [(row.problem, row.answer, row.source, row.location) for row in read(source, problems)]
    assert rows == [
        ("1+3=", "4", "sums", "my_components:sums/train:1"),
        ("2+4=", "6", "sums", "my_components:sums/train:2"),
    ]  # fmt: skip


def test_the_order(code):
    order = load(ORDER, "my_components:hardest_first", [code])
    prompts = fakes.prompts(5)
    rates = {"p1": (1.0, 2.0), "p2": (2.0, 2.0), "p3": (0.0, 2.0)}
    assert order(batch=0, count=4, prompts=prompts, pass_rates=rates) == [0, 3, 4, 1]
    assert OrderInputs(0, 4, prompts, rates, 0).count == 4


def test_the_rollout_function(code):
    requests = []

    async def generate(ids, seed, sampling, most, *, stop):
        requests.append((ids, seed, most))
        count = min(most, 2)
        return Generation([97] * count, np.full(count, -0.5, np.float32), np.full(count, 7, np.int32), "stop")

    name = "my_components:think_twice"
    function = UserRollout(name, load(ROLLOUT, name, [code]), {"hint": "3"})
    (prompt,) = fakes.prompts(1)
    rollout = asyncio.run(function.sample(prompt, 2, 11, Sampling(max_new_tokens=6), generate, Letters()))
    assert rollout.text == "aa3aa" and rollout.sample == 2
    assert rollout.sampled.tolist() == [True, True, False, True, True]
    np.testing.assert_array_equal(rollout.logprobs, np.float32([-0.5, -0.5, 0, -0.5, -0.5]))
    assert rollout.policy_versions.tolist() == [7, 7, -1, 7, 7]
    assert [(ids, most) for ids, _, most in requests] == [([1, 2, 3], 3), ([1, 2, 3, 97, 97, 51], 3)]
    assert requests[0][1] == 11 and requests[1][1] != 11  # each call has its own seed


def test_guide_and_table_of_kinds_name_the_same_keys():
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| ") and "grpo_dist." in line]
    assert len(rows) == len(KINDS) == 11
    groups = {row.split("`")[-2] for row in rows}
    assert groups == {kind.group for kind in KINDS}
    assert Path(ROOT / "grpo_dist/plugins/inputs.py").is_file()
