"""verl#5725, "skip dataloader state restore when resuming at epoch boundary", and verl#7401: a run with
epochs of 60 steps resumed at step 60, loaded the state of an exhausted data loader into the next epoch, had
no batch, and exited with status 0: its progress bar stays at 60/120.
"""

import pytest
import torch

from tests.support import fakes
from tests.support.fakes import train

PER_EPOCH, STEPS = 2, 6
PROMPTS = fakes.prompts(4 * PER_EPOCH)


def steps_of_the_bug(resumed_at):
    """Return the (epoch, batch) pairs trained if the position in the epoch goes into the first iterator."""
    position = (resumed_at - 1) % PER_EPOCH + 1  # behind the last batch handed out
    done = []
    for epoch in range(resumed_at // PER_EPOCH, STEPS // PER_EPOCH):
        done += [(epoch, batch) for batch in range(position, PER_EPOCH)]
        position = 0
    return done


def config(**changes):
    return fakes.config(steps=STEPS, checkpoint={"every": 1}, **changes)


def test_the_bug_skips_the_epoch_after_the_checkpoint():
    assert len(steps_of_the_bug(1)) == STEPS - 1
    assert len(steps_of_the_bug(PER_EPOCH)) == STEPS - 2 * PER_EPOCH  # the next epoch is empty
    assert steps_of_the_bug(STEPS - PER_EPOCH) == []


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("at", range(1, STEPS))
def test_every_remaining_step_is_trained_with_its_batch(at, staleness):
    settings = config(max_staleness=staleness)
    whole = train(fakes.World(jitter=False), settings, PROMPTS)
    resumed = fakes.World(jitter=False)
    resumed.version = at
    train(resumed, settings, PROMPTS, progress=whole.saved[at])
    assert len(resumed.updates) == STEPS - at
    for (ours,), (theirs,) in zip(resumed.updates, whole.updates[at:], strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)


def test_each_epoch_has_every_prompt_once():
    world = train(fakes.World(jitter=False), config(), PROMPTS)
    for epoch in range(STEPS // PER_EPOCH):
        entries = [world.ledger_entries[epoch * PER_EPOCH + i + 1] for i in range(PER_EPOCH)]
        listed = [uid for entry in entries for uids in entry.values() for uid in uids]
        assert sorted(listed) == sorted(prompt.uid for prompt in PROMPTS)
