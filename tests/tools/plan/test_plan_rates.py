"""The times of the stages in `grpo-dist plan`: what changes the operations, or their speed."""

from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from grpo_dist.config.engine_arguments import head_problem
from grpo_dist.errors import UserError
from grpo_dist.runs.start_checks import _tensor_parallel
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.memory import Sizes, rollout_engine
from grpo_dist.tools.plan.placement import roles_of
from grpo_dist.tools.plan.rates import UpdateWork
from grpo_dist.tools.plan.workload import workload_of
from tests.support.fakes import config
from tests.support.plans import model_of
from tests.tools.plan.test_plan import rates
from tests.tools.plan.test_plan_reward_models import one

WORK = [UpdateWork(((100, (300, 500)),) * 4)]
RATIO = 989 / 67  # an H100's FLOP/s in half precision over float32


def test_float32_is_computed_at_the_peak_of_float32():
    half, whole = rates(), rates(model={"path": "Qwen/Qwen2.5-7B", "dtype": "float32"})
    assert whole.compute_s(WORK) == pytest.approx(RATIO * half.compute_s(WORK))
    assert whole.reference_s(WORK[0]) == pytest.approx(RATIO * half.reference_s(WORK[0]))
    assert whole.prefill_s(1000) == pytest.approx(RATIO * half.prefill_s(1000))
    assert whole.decode_step_s(4096, 4096) == pytest.approx(RATIO * half.decode_step_s(4096, 4096))


def test_a_reward_model_in_float32_is_computed_at_its_peak_whatever_the_policys_type():
    half, exact = (rates().scoring_s(one(dtype=dtype), 100, (300,)) for dtype in ("bfloat16", "float32"))
    assert exact == pytest.approx(RATIO * half)


@pytest.mark.parametrize("checkpointing, share", [(True, 3 / 4), (False, 2 / 3)])
def test_frozen_weights_under_lora_have_no_gradients_to_compute(checkpointing, share):
    model = {"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": checkpointing}
    full, adapters = (rates(model=model, **changes) for changes in ({}, {"policy": {"lora": {"rank": 8}}}))
    assert adapters.compute_s(WORK) == pytest.approx(share * full.compute_s(WORK))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_step_reads_the_cache_that_the_memory_of_an_engine_counts(size):
    """Qwen2.5-3B has two key-value heads: with four or more processes each has a copy of one."""
    c = config(model={"path": "Qwen/Qwen2.5-3B"}, rollout={"tensor_parallel_size": size})
    model, sizes = model_of(c), Sizes.from_config(c, gpu=True)
    token = rollout_engine(c, model, sizes, workload_of(c, prompt_tokens=9), memory=80 * GIB).token_bytes
    engine = rates(model={"path": "Qwen/Qwen2.5-3B"}, rollout={"tensor_parallel_size": size})
    more = engine.decode_step_s(1, 2_000_000) - engine.decode_step_s(1, 1_000_000)
    assert more == pytest.approx(1_000_000 * token / 3.35e12)


def test_engines_that_would_cut_heads_of_keys_and_values_are_refused():
    """Qwen2.5-1.5B has 12 query heads and 2 key-value heads."""
    for size, fits in ((1, True), (2, True), (3, False), (4, True), (6, True)):
        c = config(model={"path": "Qwen/Qwen2.5-1.5B"}, rollout={"tensor_parallel_size": size})
        heads = Qwen2Config(num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=2)
        model = SimpleNamespace(config=heads)
        assert list(_tensor_parallel(c.rollout, model)) == ([] if fits else [head_problem(size, 2)])
        if fits:
            assert roles_of(c, model_of(c), parse_cluster("1x8xH100"))
        else:
            with pytest.raises(UserError, match="3 neither divides the 2 key-value heads"):
                roles_of(c, model_of(c), parse_cluster("1x8xH100"))
