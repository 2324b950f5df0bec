"""The experts of each token stay with its sample through records, files, batches and micro-batches."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch

from grpo_dist.batch.rows import context_ids, make_batch, split_updates, with_demonstrations
from grpo_dist.environments.dialogue import Dialogue
from grpo_dist.policy.attention import block_spans
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.types import HeldRoutes, Prompt, Task
from tests.support import made_groups
from tests.support.made_episodes import generated
from tests.support.made_groups import shard


def routed(groups):
    """Return ``groups`` with routes: token t of row i has expert 16 i + t in layer 0, modulo 256."""
    result, row = [], 0
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            routes = []
            for part in rollout.rows:
                context = context_ids(group.prompt, part)
                count = len(context) + len(part.completion_ids) - 1
                numbers = (16 * row + np.arange(count)) % 256
                routes.append(HeldRoutes(np.stack([numbers, numbers * 0], 1)[:, :, None].astype(np.uint8)))
                row += 1
            pairs = zip(rollout.further_rows, routes[1:], strict=True)
            further = tuple(replace(f, routes=r) for f, r in pairs)
            rollouts.append(replace(rollout, routes=routes[0], further_rows=further))
        result.append(replace(group, rollouts=tuple(rollouts)))
    return result


def batch_of(groups):
    advantages = [np.ones(len(g.rollouts), np.float32) for g in groups]
    return make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=40)


def firsts(batch):
    return [None if routes is None else int(routes.fetch()[0, 0, 0]) for routes in batch.routes]


def same(a, b):
    return a.fetch().dtype == b.fetch().dtype and np.array_equal(a.fetch(), b.fetch())


def test_messages_and_checkpoints_keep_routes(tmp_path):
    """Also of further rows. The records of a run do not fetch them."""
    groups = routed(made_groups.episode_groups(rewritten=0.6))
    made_groups.check_stored(groups, tmp_path, "routes", same)


def test_a_batch_has_the_routes_of_its_rows():
    groups = routed(made_groups.episode_groups(rewritten=0.6))
    batch = batch_of(groups)
    assert len(batch) > sum(len(g.rollouts) for g in groups)
    assert firsts(batch) == [16 * i % 256 for i in range(len(batch))]
    assert firsts(batch.select([3, 1])) == [48, 16]
    halves = shard(batch, 2)
    assert sorted(firsts(halves[0]) + firsts(halves[1])) == sorted(firsts(batch))
    assert all(firsts(half) == [16 * i % 256 for i in half.row_ids.tolist()] for half in halves)
    updates = split_updates(batch, num_groups=3, num_updates=3)
    assert [first for update in updates for first in firsts(update)] == firsts(batch)
    assert batch_of(made_groups.episode_groups()).routes is None


def test_demonstrations_have_no_routes():
    batch = batch_of(routed(made_groups.episode_groups()))
    both = with_demonstrations(batch, made_groups.demonstrations(3), first_row=len(batch))
    assert firsts(both) == [*firsts(batch), None, None, None]


def test_every_token_of_a_micro_batch_has_its_routes():
    """Padded and packed; the last token of a row, padding and an empty micro-batch have none."""
    groups = routed(made_groups.episode_groups(samples=2))
    batch = batch_of(groups)
    for kernel in (None, block_spans):
        micro = MicroBatches(10_000, kernel, 8, torch.device("cpu"))
        part = micro.part(batch, [4, 0])
        layout = micro.layout(part, part.wanted)
        actual = layout.routes[:, 0, 0].tolist()
        lengths = batch.lengths.tolist()
        expected = [[*((16 * row + t) % 256 for t in range(lengths[row] - 1)), -1] for row in (4, 0)]
        if kernel is None:
            width = layout.tokens.shape[1]
            assert actual == [e for row in expected for e in [*row, *[-1] * (width - len(row))]]
        else:
            flat = expected[0] + expected[1]
            assert actual == [*flat, *[-1] * (layout.tokens.shape[1] - len(flat))]
        blank = micro.part(batch, [])
        assert micro.layout(blank, blank.wanted).routes is None


def test_the_budget_of_a_micro_batch_counts_a_prompt_for_each_way_it_was_routed(monkeypatch):
    """Samples whose prompt took other experts do not share it; plan and stream count it equally often. Ranks
    plan without fetching routes.
    """
    monkeypatch.setattr(MicroBatches, "max_over_ranks", lambda _, value: value)
    alike = made_groups.batch(groups=3, samples=4)
    rng = np.random.default_rng(0)
    routes = tuple(
        HeldRoutes(rng.integers(0, 2, (length - 1, 1, 1)).astype(np.uint8))
        for length in alike.lengths.tolist()
    )
    other = replace(alike, routes=routes)
    micro = MicroBatches(60, block_spans, 1, torch.device("cpu"))
    sizes = {}
    for name, batch in (("alike", alike), ("other", other)):
        plan = micro.plan(batch)
        assert sorted(row for rows in plan for row in rows) == list(range(len(batch)))
        parts = [batch.select(rows) for rows in plan]
        widths = [micro.layout(part, part.wanted).tokens.shape[1] for part in parts]
        assert all(width <= 60 or len(rows) == 1 for width, rows in zip(widths, plan, strict=True))
        sizes[name] = sum(widths)
    assert sizes["other"] == int(alike.lengths.sum()) > sizes["alike"]
    fetched = []
    unfetched = tuple(Unfetched(held, fetched) for held in routes)
    assert micro.plan(replace(alike, routes=unfetched)) == micro.plan(other) and fetched == []


@dataclass(frozen=True)
class Unfetched:
    """Routes in a store, with the digest of their prompt."""

    held: HeldRoutes
    fetched: list

    def fetch(self):
        self.fetched.append(self)
        return self.held.fetch()

    def digest(self, tokens):
        return self.held.digest(tokens)


def test_an_episode_has_the_routes_of_its_last_request():
    """A request reads the whole row, so its routes cover every earlier token."""
    prompt = Prompt("p", np.array([1, 2], np.int32), "", "", task=Task("e"))
    renderer = SimpleNamespace(text=str, parse=lambda *_: SimpleNamespace(text="a"), ids=lambda _: [9])
    dialogue = Dialogue(renderer, prompt)
    first, last = (HeldRoutes(np.zeros((size, 1, 1), np.uint8)) for size in (3, 6))
    dialogue.add_action(generated([5, 6], -1.0, routes=first))
    dialogue._rows[-1].give([9])
    dialogue.add_action(generated([5, 6], -1.0, routes=last))
    rollout = dialogue.rollout(0, "stop")
    assert rollout.routes is last and len(rollout.completion_ids) == 5
