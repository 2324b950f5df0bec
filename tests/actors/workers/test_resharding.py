"""A policy state moves to other ranks or another ZeRO stage with every number, and training continues."""

import asyncio

import pytest
import torch

from grpo_dist.config import LoRAConfig, OffloadConfig
from grpo_dist.policy.saved_state import MOMENTS, WEIGHTS, SavedPolicy
from tests.support import made_groups
from tests.support.real_ranks import OpenWorker, on_all, running

pytestmark = [pytest.mark.machine, pytest.mark.slow]
FIRST, SECOND = (made_groups.batch(seed=seed) for seed in (1, 2))


class ReportingWorker(OpenWorker):
    def saved(self, directory):
        """Return a checkpoint's numbers: name -> WEIGHTS, MOMENTS -> tensor; and Adam's count of steps."""
        trainer = self._trainer
        names = [name for name, p in trainer.engine.module.named_parameters() if p.requires_grad]
        state = SavedPolicy(directory / "state", trainer.state.files.mapped)
        state.open(names)
        every = (WEIGHTS, *MOMENTS)
        return {name: {what: state.whole(name, what) for what in every} for name in names}, state.steps

    def computes_with(self, directory):
        """Return whether forward passes see the weights of a checkpoint, in the precision of the model."""
        numbers, _ = self.saved(directory)
        names = dict(self._trainer.engine.module.named_parameters())
        with self._trainer.weights.gathered(list(names.values())):
            weights = {name: names[name].detach().reshape(-1) for name in numbers}
            return all(torch.equal(w, numbers[name][WEIGHTS].to(w.dtype)) for name, w in weights.items())


def trained(model_dir, directory, *, load=None, **how):
    """Return `ReportingWorker.saved` of the state after an update on FIRST, or of the one to ``load``, and of
    the state after another update on SECOND.
    """
    directory.mkdir()

    async def session():
        async with running(
            model_dir, worker=ReportingWorker, schedule="linear", warmup_steps=2, **how
        ) as group:
            await (group.load(load) if load else group.update(group.stage([FIRST])))
            await group.save(directory / "first")
            assert all(await on_all(group, "computes_with", directory / "first"))
            await group.update(group.stage([SECOND]))
            await group.save(directory / "second")
            saved = [(await on_all(group, "saved", directory / name))[0] for name in ("first", "second")]
            weights = await on_all(group, "weights")
        assert all(torch.equal(rank[name], weights[0][name]) for rank in weights for name in rank)
        return saved

    return asyncio.run(session())


def check_same_but_rounding(ours, theirs):
    """Compare moments, and weights where Adam, dividing by sqrt(exp_avg_sq), does not amplify rounding."""
    largest = {what: max(numbers[what].abs().max() for numbers in theirs.values()) for what in MOMENTS}
    for name, ref in theirs.items():
        for moment in MOMENTS:
            assert (ours[name][moment] - ref[moment]).abs().max() < 1e-5 * largest[moment], (name, moment)
        stable = ref["exp_avg_sq"] > 1e-4 * largest["exp_avg_sq"]
        assert (ours[name][WEIGHTS] - ref[WEIGHTS])[stable].abs().sum() < 1e-6 * max(1, stable.sum()), name


ONE = {"ranks": 1, "stage": 0}
TO_ALL_STAGES = [ONE, {"ranks": 2, "stage": 3}, {"ranks": 3, "stage": 2}, {"ranks": 2, "stage": 1}, ONE]
SHARED_SEQUENCES = [{"ranks": 3, "stage": 3}, {"ranks": 2, "stage": 2}, {"ranks": 2, "stage": 3, "shared": 2}]


def with_all(chain, **how):
    return [layout | how for layout in chain]


def offloaded(*what, ranks, stage):
    return {"ranks": ranks, "stage": stage, "offload": OffloadConfig(**dict.fromkeys(what, "cpu"))}


@pytest.mark.parametrize(
    ("chain", "exact"),
    [
            (TO_ALL_STAGES, True),
            (SHARED_SEQUENCES, True),
            (with_all(TO_ALL_STAGES, lora=LoRAConfig(rank=4)), True),
            ([TO_ALL_STAGES[2], offloaded("optimizer", ranks=1, stage=1),
              offloaded("optimizer", "parameters", ranks=2, stage=3), ONE], True),
            # Gradients in bfloat16 differ with the rows in one matrix.
            (with_all(TO_ALL_STAGES[1:-1], dtype="bfloat16"), False),
        ],
)  # fmt: skip
def test_every_number_arrives_and_training_continues(forked_ranks, tiny_model, tmp_path, chain, exact):
    saved = trained(tiny_model, tmp_path / "0", **chain[0])
    for number, how in enumerate(chain[1:]):
        (ref, steps), (ref_after, _) = saved
        saved = trained(tiny_model, tmp_path / f"{number + 1}", load=tmp_path / f"{number}" / "first", **how)
        (loaded, loaded_steps), (after, after_steps) = saved
        assert (loaded_steps, after_steps) == (steps, steps + 1) == (1, 2)
        assert loaded.keys() == ref.keys() and len(loaded) > 40
        for name, numbers in loaded.items():
            assert all(torch.equal(value, ref[name][what]) for what, value in numbers.items()), (how, name)
        if exact:
            check_same_but_rounding(after, ref_after)
