"""Memory of supervised training, as a stage and before a run: counted by `check` and by `plan`."""

import pytest

from actors.placement.demands import Resources, placement
from grpo_dist.config import SupervisedConfig
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import Sizes, cold_start, is_trained_first, supervised_rank
from grpo_dist.tools.plan.models import published
from grpo_dist.tools.plan.options import Assumptions
from grpo_dist.tools.plan.placement import cold_start_problem, supervised_problem
from grpo_dist.tools.recipe.config import load_pipeline
from tests.support import fakes
from tests.support.documents import ROOT
from tests.support.plans import printed

SEVEN = published("Qwen/Qwen2.5-7B")
H100 = parse_cluster("1x8xH100")


def config(ranks=8, stage=3, sft=(), **changes):
    defaults = {"model": "Qwen/Qwen2.5-7B", "data": "demo:add3"}
    defaults |= {"batch_size": 64, "max_length": 4096, "steps": 100}
    batch = {"prompts_per_step": 16, "samples_per_prompt": 8, "micro_batch_tokens": 8192}
    return SupervisedConfig.from_config(
        fakes.config(
            model={"path": "sft", "gradient_checkpointing": True, **changes.pop("model", {})},
            sft=defaults | dict(sft),
            batch=batch | changes.pop("batch", {}),
            policy={"num_workers": ranks, "zero_stage": stage, **changes.pop("policy", {})},
            **changes,
        )
    )


def rank(settings):
    return supervised_rank(settings, SEVEN, Sizes.from_config(settings, gpu=True))


def test_seven_billion_parameters_fit_on_eight_gpus_and_not_on_one_and_the_refusal_names_the_remedy():
    eight, one = config(), config(ranks=1, stage=1, model={"gradient_checkpointing": False})
    need = rank(eight)
    # Bytes per parameter, divided by eight: bfloat16 weights, float32 gradients, 12 of the optimiser.
    states = [need.parts[name] for name in ("weights", "gradients", "optimiser")]
    assert states == pytest.approx([n * SEVEN.parameters / 8 for n in (2, 4, 12)], rel=1e-3)
    assert need.total < 60 * GIB and supervised_problem(eight, need, H100) is None
    problem = supervised_problem(one, rank(one), H100)
    assert "`model.gradient_checkpointing`" in problem and "`policy.zero_stage`" in problem


def test_adapters_take_hardly_more_than_the_weights():
    need = rank(config(ranks=1, stage=1, policy={"lora": {"rank": 16}}))
    assert need.parts["optimiser"] < 0.04 * need.parts["weights"]
    assert need.total < 40 * GIB


def test_activations_are_those_of_a_micro_batch_or_of_one_row_that_is_longer():
    small = rank(config(batch={"micro_batch_tokens": 4096})).parts["activations"]
    assert rank(config()).parts["activations"] == pytest.approx(2 * small, rel=0.01)
    assert rank(config(batch={"micro_batch_tokens": 512})).parts["activations"] == small
    few = config(sft={"batch_size": 8, "max_length": 512})  # one row of 512 tokens a rank
    assert rank(few).parts["activations"] == pytest.approx(small / 8, rel=0.01)


def test_every_supervised_stage_of_the_shipped_recipe_at_7b_fits_its_two_nodes():
    cluster = parse_cluster("2x8xH100")
    totals = {}
    for stage in load_pipeline(ROOT / "configs/pipelines/r1_qwen2.5_7b.yaml").stages:
        if stage.kind != "sft":
            continue
        settings = SupervisedConfig.from_config(stage.config)
        model = published(settings.sft.model)
        assert model is not None
        need = supervised_rank(settings, model, Sizes.from_config(settings, gpu=True))
        assert supervised_problem(settings, need, cluster) is None
        assert placement(settings, Resources(2 * 96, 16), training=True)["policy"].workers == 16
        assert list(placement(settings, Resources(2 * 96, 16), training=True)) == ["policy"]
        totals[stage.name] = need.total / GIB
    assert list(totals) == ["cold_start", "second_sft", "distilled"]
    assert totals["distilled"] < totals["cold_start"] < 60


# Before a run


def cold(**sft):
    """Return a run that starts with supervised training in one process."""
    return fakes.config(
        model={"path": "sft", "gradient_checkpointing": True},
        sft={"model": "Qwen/Qwen2.5-1.5B", "data": "pairs.jsonl"} | sft,
        policy={"num_workers": 4},
        batch={"prompts_per_step": 4},
    )


def needed(c, model, **changes):
    return cold_start(c.sft, model, Sizes.from_config(c, gpu=True), **changes)


def test_states_are_four_float32_numbers_per_weight_and_activations_are_those_of_the_batch():
    model = published("Qwen/Qwen2.5-1.5B")
    one, two = (needed(cold(batch_size=n), model, longest=64) for n in (4, 8))
    states = sum(one.parts[name] for name in ("weights", "gradients", "optimiser"))
    assert states == 16 * model.parameters
    assert two.parts["activations"] == pytest.approx(2 * one.parts["activations"])
    bounded = needed(cold(batch_size=4, max_length=64), model)
    assert bounded.total == one.total  # unknown rows count as the longest possible


def test_what_does_not_fit_names_the_keys_to_lower():
    model, cluster = published("Qwen/Qwen2.5-1.5B"), parse_cluster("1x8xH100")
    small, large = (needed(cold(), model, longest=n) for n in (16, 4096))
    assert cold_start_problem(small, cluster) is None
    problem = cold_start_problem(large, cluster)
    assert problem.startswith("cold start: ") and "lower `sft.batch_size` or `sft.max_length`" in problem


def test_a_plan_counts_the_cold_start():
    assert is_trained_first(cold().model, cold().sft)
    assert not is_trained_first(fakes.config().model, fakes.config().sft)
    plan = make_plan(cold(), "1x8xH100", Assumptions(prompt_tokens=50), splits=False)
    text = printed(plan)
    assert "cold start, before all workers: " in text and "48 rows of `sft.max_length` = 1024 tokens" in text
    assert "warning: cold start: " in text and "`check` uses the real lengths of the rows" in text
