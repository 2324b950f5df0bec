"""A peer gets the same work as `grpo-dist bench`."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from grpo_dist.config.files import load_config
from grpo_dist.runtime.seeds import request_seed
from grpo_dist.tools.bench.lengths import ForcedLengths
from grpo_dist.types import Sampling
from tests.support.fakes import prompts

ROOT = Path(__file__).resolve().parents[3]
TAIL = ROOT / "configs/bench/cpu_13m_tail.yaml"


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("make_inputs", ROOT / "launch/peers/make_inputs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RecordingRollouts:
    """A rollouts handle that only records its requests."""

    def __init__(self):
        self.lengths = {}

    async def sample(self, prompt, *, seeds, sampling):
        self.lengths |= dict(zip(seeds, sampling.lengths or [None] * len(seeds), strict=True))


@pytest.mark.parametrize("overrides", [[], ["sampling.max_new_tokens={schedule: [[0, 64], [2, 384]]}"]])
def test_a_peers_completions_are_as_long_as_those_of_the_benchmark(peers, overrides):
    config = load_config(TAIL, overrides)
    sampling = Sampling(max_new_tokens=config.sampling.longest)
    for step, prompt in enumerate(prompts(3)):
        seeds = [
            request_seed(config.seed, step, prompt.uid, i) for i in range(config.batch.samples_per_prompt)
        ]
        fake = RecordingRollouts()
        asyncio.run(ForcedLengths(fake, config.bench.lengths).sample(prompt, seeds=seeds, sampling=sampling))
        assert peers._lengths(config, prompt.uid, step) == [fake.lengths[seed] for seed in seeds]


@pytest.mark.parametrize(
    "override, words", [("data.order=length", "data.order = length"), ("data.train.0.weight=2", "weight = 2")]
)
def test_an_order_that_a_peer_cannot_follow_is_refused(peers, override, words):
    with pytest.raises(ValueError, match=words):
        peers._check_order(load_config(TAIL, [override]).data)
