"""A policy state moves to other ranks or another ZeRO stage with every number, and training continues."""

import asyncio

import pytest
import torch

from grpo_dist.config import LoRAConfig
from grpo_dist.policy.saved_state import MOMENTS, WEIGHTS, SavedPolicy
from tests.support import made_groups
from tests.support.real_ranks import OpenWorker, on_all, start

pytestmark = [pytest.mark.machine, pytest.mark.slow]
FIRST, SECOND = (made_groups.batch(seed=seed) for seed in (1, 2))


class ToldWorker(OpenWorker):
    def saved(self, directory):
        """What is in a checkpoint: name -> WEIGHTS, MOMENTS -> every number; and Adam's count of steps."""
        trainer = self._trainer
        names = [name for name, p in trainer.engine.module.named_parameters() if p.requires_grad]
        found = SavedPolicy(directory / "state", trainer.state.files.mapped)
        found.open(names)
        every = (WEIGHTS, *MOMENTS)
        return {name: {what: found.whole(name, what) for what in every} for name in names}, found.steps

    def computes_with(self, directory):
        """Whether the weights that forwards see are those of a checkpoint, in their own precision."""
        told, _ = self.saved(directory)
        names = dict(self._trainer.engine.module.named_parameters())
        with self._trainer.weights.gathered(list(names.values())):
            here = {name: names[name].detach().reshape(-1) for name in told}
            return all(torch.equal(own, told[name][WEIGHTS].to(own.dtype)) for name, own in here.items())


def trained(model_dir, directory, *, load=None, **how):
    """What `ToldWorker.saved` says of a state, the one after an update of FIRST or a loaded one, and of that
    after another of SECOND.
    """

    async def session():
        group = start(model_dir, worker=ToldWorker, schedule="linear", warmup_steps=2, **how)
        await group.ready()
        await (group.load(load) if load else group.update(group.stage([FIRST])))
        await group.save(directory / "first")
        assert all(await on_all(group, "computes_with", directory / "first"))
        await group.update(group.stage([SECOND]))
        await group.save(directory / "second")
        told = [(await on_all(group, "saved", directory / name))[0] for name in ("first", "second")]
        weights = await on_all(group, "weights")
        await group.shutdown()
        assert all(torch.equal(own[name], weights[0][name]) for own in weights for name in own)
        return told

    return asyncio.run(session())


def check_same_but_rounding(ours, theirs):
    """Weights where Adam does not blow up rounding: it divides by the root of its second average."""
    largest = {what: max(own[what].abs().max() for own in theirs.values()) for what in MOMENTS}
    for name, own in theirs.items():
        for moment in MOMENTS:
            assert (ours[name][moment] - own[moment]).abs().max() < 1e-5 * largest[moment], (name, moment)
        told = own["exp_avg_sq"] > 1e-4 * largest["exp_avg_sq"]
        assert (ours[name][WEIGHTS] - own[WEIGHTS])[told].abs().sum() < 1e-6 * max(1, told.sum()), name


ONE = {"ranks": 1, "stage": 0}
TO_ALL_STAGES = [ONE, {"ranks": 2, "stage": 3}, {"ranks": 3, "stage": 2}, {"ranks": 2, "stage": 1}, ONE]
SHARED_SEQUENCES = [{"ranks": 3, "stage": 3}, {"ranks": 2, "stage": 2}, {"ranks": 2, "stage": 3, "shared": 2}]


def with_all(chain, **how):
    return [own | how for own in chain]


def offloaded(*what, ranks, stage):
    section = {f"offload_{name}": {"device": "cpu"} for name in what}
    return {"ranks": ranks, "stage": stage, "deepspeed": {"zero_optimization": section}}


@pytest.mark.parametrize(
    ("chain", "exact"),
    [
            (TO_ALL_STAGES, True),
            (SHARED_SEQUENCES, True),
            (with_all(TO_ALL_STAGES, lora=LoRAConfig(rank=4)), True),
            ([TO_ALL_STAGES[2], offloaded("optimizer", ranks=1, stage=1),
              offloaded("optimizer", "param", ranks=2, stage=3), ONE], True),
            # Gradients in bfloat16 are others for other rows in one matrix.
            (with_all(TO_ALL_STAGES[1:-1], dtype="bfloat16"), False),
        ],
)  # fmt: skip
def test_every_number_arrives_and_training_continues(forked_ranks, tiny_model, tmp_path, chain, exact):
    told = trained(tiny_model, tmp_path / "0", **chain[0])
    for number, now in enumerate(chain[1:]):
        (was, steps), (then, _) = told
        told = trained(tiny_model, tmp_path / f"{number + 1}", load=tmp_path / f"{number}" / "first", **now)
        (found, own_steps), (after, after_steps) = told
        assert (own_steps, after_steps) == (steps, steps + 1) == (1, 2)
        assert found.keys() == was.keys() and len(found) > 40
        for name, numbers in found.items():
            assert all(torch.equal(value, was[name][what]) for what, value in numbers.items()), (now, name)
        if exact:
            check_same_but_rounding(after, then)
