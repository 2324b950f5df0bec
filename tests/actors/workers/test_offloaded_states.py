"""Ranks that free their device between two updates: every optimizer that DeepSpeed picks, for every ZeRO
stage and dtype, ends up with the same weights to the last bit.
"""

import asyncio

import pytest
import torch

from grpo_dist.config import LoRAConfig, OffloadConfig
from grpo_dist.policy.rank_memory import tensors_in
from tests.support import made_groups
from tests.support.real_ranks import OpenWorker, on_all, running

pytestmark = [pytest.mark.machine, pytest.mark.slow]

LORA = LoRAConfig(rank=4)
CPU = OffloadConfig(optimizer="cpu")
KINDS = {
    "float32, ZeRO-0": ({"stage": 0}, "AdamW"),
    "bfloat16, ZeRO-1": ({"stage": 1, "dtype": "bfloat16"}, "BF16_Optimizer"),
    "bfloat16, ZeRO-3": ({"stage": 3, "dtype": "bfloat16"}, "DeepSpeedZeroOptimizer_Stage3"),
    "bfloat16, ZeRO-2, adapters": ({"stage": 2, "dtype": "bfloat16", "lora": LORA}, "DeepSpeedZeroOptimizer"),
    "float32, ZeRO-3": ({"stage": 3}, "DeepSpeedZeroOptimizer_Stage3"),
    "bfloat16, ZeRO-2, optimiser on the CPU": (
        {"stage": 2, "dtype": "bfloat16", "offload": CPU},
        "DeepSpeedZeroOptimizer",
    ),
    "float32, ZeRO-3, all on the CPU": (
        {"stage": 3, "offload": OffloadConfig(optimizer="cpu", parameters="cpu")},
        "DeepSpeedZeroOptimizer_Stage3",
    ),
}


class MovingWorker(OpenWorker):
    """A rank that reports the memory it holds."""

    def optimizer(self):
        return type(self._trainer.engine.optimizer).__name__

    def bytes_held(self):
        """Return the bytes of parameters, and of gradients and optimiser state, without mapped files."""
        engine = self._trainer.engine
        parameters = list(engine.module.parameters())
        weights = [t for p in parameters for t in (p.data, getattr(p, "ds_tensor", p.data))]
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        state = [*tensors_in(vars(engine.optimizer)), *tensors_in(vars(inner))]
        weight_keys = {t.untyped_storage()._cdata for t in weights}
        state += [*tensors_in([b.buffer for b in getattr(engine.optimizer, "ipg_buckets", {}).values()])]
        held = [t.untyped_storage() for t in [*weights, *state] if not t.is_meta]
        sizes = {storage._cdata: storage.nbytes() for storage in held if storage.resizable()}
        return (
            sum(size for key, size in sizes.items() if key in weight_keys),
            sum(size for key, size in sizes.items() if key not in weight_keys),
        )


async def two_updates(model_dir, *, moves, **how):
    """Return the optimizer's class, the metrics of both updates and the weights at the end, with ``moves``
    between the two as in a step: what the push needs stays, then leaves, then all returns.
    """
    async with running(model_dir, ranks=2, micro_batch_tokens=40, worker=MovingWorker, **how) as group:
        kinds = set(await on_all(group, "optimizer"))
        metrics = [await group.update(group.stage([made_groups.batch(seed=1)]))]
        if moves:
            whole = await on_all(group, "weights")  # also leaves ZeRO-3 nothing gathered
            before = await on_all(group, "bytes_held")
            await group.hold("weights")
            assert [state for _, state in await on_all(group, "bytes_held")] == [0, 0]
            pushed = await on_all(group, "weights")
            await group.hold("nothing")
            assert await on_all(group, "bytes_held") == [(0, 0)] * 2
            await group.hold("weights")
            assert [state for _, state in await on_all(group, "bytes_held")] == [0, 0]
            pushed += await on_all(group, "weights")
            await group.hold("all")
            assert await on_all(group, "bytes_held") == before
            returned = await on_all(group, "weights")
            for ours in (*pushed, *returned):
                assert all(torch.equal(ours[name], value) for name, value in whole[0].items())
        metrics.append(await group.update(group.stage([made_groups.batch(seed=2)])))
        weights = (await on_all(group, "weights"))[0]
    return kinds, metrics, weights


@pytest.mark.parametrize(("how", "optimizer"), KINDS.values(), ids=KINDS)
def test_an_update_after_a_turn_of_other_roles_is_the_same_to_the_last_bit(
    forked_ranks, tiny_model, how, optimizer
):
    kinds, metrics, weights = asyncio.run(two_updates(tiny_model, moves=True, **how))
    assert kinds == {optimizer}
    _, expected_metrics, expected = asyncio.run(two_updates(tiny_model, moves=False, **how))
    assert metrics == expected_metrics
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
