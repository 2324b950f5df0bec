"""The experts of each token travel with its sample: through records, files, batches and micro-batches."""

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
    """Return ``groups`` whose token t of row i of the batch has expert 16 i + t in layer 0, modulo 256."""
    made, row = [], 0
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            own = []
            for one in rollout.rows:
                context = context_ids(group.prompt, one)
                count = len(context) + len(one.completion_ids) - 1
                numbers = (16 * row + np.arange(count)) % 256
                own.append(HeldRoutes(np.stack([numbers, numbers * 0], 1)[:, :, None].astype(np.uint8)))
                row += 1
            further = tuple(replace(f, routes=r) for f, r in zip(rollout.further_rows, own[1:], strict=True))
            rollouts.append(replace(rollout, routes=own[0], further_rows=further))
        made.append(replace(group, rollouts=tuple(rollouts)))
    return made


def batch_of(groups):
    advantages = [np.ones(len(g.rollouts), np.float32) for g in groups]
    return make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=40)


def firsts(batch):
    return [None if own is None else int(own.fetch()[0, 0, 0]) for own in batch.routes]


def same(a, b):
    return a.fetch().dtype == b.fetch().dtype and np.array_equal(a.fetch(), b.fetch())


def test_messages_and_checkpoints_keep_routes(tmp_path):
    """Of further rows, too. The records of a run do not fetch them."""
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
    assert all(firsts(own) == [16 * i % 256 for i in own.row_ids.tolist()] for own in halves)
    updates = split_updates(batch, num_groups=3, num_updates=3)
    assert [first for update in updates for first in firsts(update)] == firsts(batch)
    assert batch_of(made_groups.episode_groups()).routes is None


def test_demonstrations_have_no_routes():
    batch = batch_of(routed(made_groups.episode_groups()))
    both = with_demonstrations(batch, made_groups.demonstrations(3), first_row=len(batch))
    assert firsts(both) == [*firsts(batch), None, None, None]


def test_every_token_of_a_micro_batch_has_its_own_routes():
    """Padded and packed; the last token of a row, padding and an empty micro-batch have none."""
    groups = routed(made_groups.episode_groups(samples=2))
    batch = batch_of(groups)
    for kernel in (None, block_spans):
        micro = MicroBatches(10_000, kernel, 8, torch.device("cpu"))
        part = micro.part(batch, [4, 0])
        layout = micro.layout(part, part.wanted)
        found = layout.routes[:, 0, 0].tolist()
        wanted = [[*((16 * row + t) % 256 for t in range(int(batch.lengths[row]) - 1)), -1] for row in (4, 0)]
        if kernel is None:
            width = layout.tokens.shape[1]
            assert found == [e for own in wanted for e in [*own, *[-1] * (width - len(own))]]
        else:
            flat = wanted[0] + wanted[1]
            assert found == [*flat, *[-1] * (layout.tokens.shape[1] - len(flat))]
        blank = micro.part(batch, [])
        assert micro.layout(blank, blank.wanted).routes is None


def test_the_budget_of_a_micro_batch_counts_a_prompt_for_each_way_it_was_routed(monkeypatch):
    """Samples whose prompt took other experts do not share it: the stream has it as often as it is planned.
    Ranks do not fetch routes to plan.
    """
    monkeypatch.setattr(MicroBatches, "max_over_ranks", lambda _, own: own)
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
    unfetched = tuple(Unfetched(own, fetched) for own in routes)
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
    """A request reads the whole row, so its routes are those of every token before."""
    prompt = Prompt("p", np.array([1, 2], np.int32), "", "", task=Task("e"))
    dialogue = Dialogue(
        SimpleNamespace(text=str, parse=lambda *_: SimpleNamespace(text="a"), ids=lambda _: [9]), prompt
    )
    first, last = (HeldRoutes(np.zeros((size, 1, 1), np.uint8)) for size in (3, 6))
    dialogue.add_action(generated([5, 6], -1.0, routes=first))
    dialogue._rows[-1].give([9])
    dialogue.add_action(generated([5, 6], -1.0, routes=last))
    rollout = dialogue.rollout(0, "stop")
    assert rollout.routes is last
    assert len(rollout.completion_ids) == 5
