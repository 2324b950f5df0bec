"""verl#5392 asks for routing replay under FSDP: a 30B mixture of experts was trained on samples of an engine
that chose other experts, and the log-probs of both had a correlation of only 0.6.

Here two of the router's four experts are almost equally good for a token. The engine rounds its logits to
bfloat16 and takes the other expert: the weights are the same, the token's log-prob is not.
"""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from grpo_dist.driver import run
from grpo_dist.errors import Unhealthy
from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.types import Rollout
from tests.support import fakes

ROUTER = torch.tensor([1.0, 1.0009765625, -2.0, -3.0])  # the second wins by 2^-10, less than bfloat16 shows
EXPERTS = torch.tensor([[2.0, 0, 0], [0, 2.0, 0], [0, 0, 2.0], [1.0, 1, 1]])
TOKEN = 0


def logprob(route):
    """Return the log-prob of the token from the expert ``route``."""
    return float(EXPERTS[route].log_softmax(-1)[TOKEN])


def routes():
    return int(ROUTER.argmax()), int(ROUTER.bfloat16().argmax())


class Mixture(fakes.World):
    """A policy and an engine with the same weights and differently rounded routers."""

    def __init__(self, replayed):
        super().__init__(jitter=False)
        self.trainer, self.engine = (routes()[0], routes()[0] if replayed else routes()[1])
        self.notes = []

    def note(self, message):
        self.notes.append(message)

    def workers(self, reference=False):
        return dataclasses.replace(super().workers(reference), probe=self)

    def engines(self):
        return {"rollout-0": self}

    async def sample(self, *request, **how):
        if not isinstance(request[0], Mixture):
            return await super().sample(*request, **how)
        _, prompts, seeds, _ = request
        values, versions = np.full(2, logprob(self.engine), np.float32), np.full(2, self.version, np.int32)
        ids = np.array([TOKEN, TOKEN], np.int32)
        return [
            tuple(Rollout(p.uid, i, ids, values, "stop", "x", versions) for i in range(len(seeds)))
            for p in prompts
        ]

    async def logprobs(self, batch):
        values = np.full(2, logprob(self.trainer), np.float32)
        return "bfloat16", dict.fromkeys(batch.row_ids.tolist(), values)


def train(world):
    settings = fakes.config(steps=2)
    asyncio.run(run(settings, world.workers(), fakes.prompts(40), [], world, world))


def test_the_bug_takes_a_ratio_of_e_squared_for_a_move_of_the_policy():
    """No weight has moved, yet the importance ratio of the token is 0.14."""
    ours, theirs = routes()
    assert (ours, theirs) == (1, 0)
    assert np.exp(logprob(ours) - logprob(theirs)) == pytest.approx(np.exp(-2), rel=1e-5)


def test_a_run_whose_engine_takes_other_experts_ends_before_its_first_update():
    world = Mixture(replayed=False)
    assert abs(logprob(world.trainer) - logprob(world.engine)) > BOUNDS["bfloat16"]
    with pytest.raises(Unhealthy, match=r"not the same model at version 0: rollout-0 .* differ by 2 nats"):
        train(world)
    assert world.updates == []


def test_the_same_routes_give_the_same_log_probs_and_train():
    world = Mixture(replayed=True)
    train(world)
    assert len(world.updates) == 2 and "differ" not in "".join(world.notes)
