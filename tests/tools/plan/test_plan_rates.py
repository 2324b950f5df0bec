"""The times of the stages in `grpo-dist plan`: what changes the operations, or how fast they are."""

import pytest

from grpo_dist.tools.plan.rates import UpdateWork
from tests.tools.plan.test_plan import rates
from tests.tools.plan.test_plan_reward_models import one

WORK = [UpdateWork(((100, (300, 500)),) * 4)]
RATIO = 989 / 67  # of an H100's operations in half precision and in float32


def test_float32_is_computed_at_the_peak_of_float32():
    half, whole = rates(), rates(model={"path": "Qwen/Qwen2.5-7B", "dtype": "float32"})
    assert whole.compute_s(WORK) == pytest.approx(RATIO * half.compute_s(WORK))
    assert whole.reference_s(WORK[0]) == pytest.approx(RATIO * half.reference_s(WORK[0]))
    assert whole.prefill_s(1000) == pytest.approx(RATIO * half.prefill_s(1000))
    assert whole.decode_step_s(4096, 4096) == pytest.approx(RATIO * half.decode_step_s(4096, 4096))


def test_a_reward_model_in_float32_is_computed_at_its_peak_whatever_the_policys_type():
    half, exact = (rates().reward_model_s(one(dtype=dtype), 100, (300,)) for dtype in ("bfloat16", "float32"))
    assert exact == pytest.approx(RATIO * half)


@pytest.mark.parametrize("checkpointing, share", [(True, 3 / 4), (False, 2 / 3)])
def test_frozen_weights_under_lora_have_no_gradients_to_compute(checkpointing, share):
    model = {"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": checkpointing}
    full, adapters = (rates(model=model, **changes) for changes in ({}, {"policy": {"lora": {"rank": 8}}}))
    assert adapters.compute_s(WORK) == pytest.approx(share * full.compute_s(WORK))
