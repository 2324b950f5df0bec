"""verl#5725, "skip dataloader state restore when resuming at epoch boundary", and verl#7401: a run that
resumed at step 60 of epochs of 60 steps loaded the state of an exhausted data loader into the next epoch, had
no batch, and exited with status 0: its progress bar stays at 60/120.
"""

import pytest
import torch

from tests.support import fakes
from tests.support.fakes import train

PER_EPOCH, STEPS = 2, 6
PROMPTS = fakes.prompts(4 * PER_EPOCH)


def steps_of_the_bug(resumed_at):
    """Epochs of ``PER_EPOCH`` batches; the position within the epoch is restored into the first iterator."""
    position = (resumed_at - 1) % PER_EPOCH + 1  # behind the last batch that was given out
    done = []
    for epoch in range(resumed_at // PER_EPOCH, STEPS // PER_EPOCH):
        done += [(epoch, batch) for batch in range(position, PER_EPOCH)]
        position = 0
    return done


def config(**changes):
    return fakes.config(steps=STEPS, checkpoint={"every": 1}, **changes)


def test_the_bug_skips_the_epoch_behind_the_checkpoint():
    assert len(steps_of_the_bug(1)) == STEPS - 1
    assert len(steps_of_the_bug(PER_EPOCH)) == STEPS - 2 * PER_EPOCH  # of the next epoch, nothing
    assert steps_of_the_bug(STEPS - PER_EPOCH) == []


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("at", range(1, STEPS))
def test_every_step_that_is_left_is_trained_with_its_own_batch(at, staleness):
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
