"""Which splits of the GPUs `grpo-dist plan` tries, and what it reports on them."""

from dataclasses import replace

import pytest

from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.options import (
    Assumptions,
    Option,
    build_setting,
    option_of,
    option_or_reason,
    planned,
)
from grpo_dist.tools.plan.search import SearchResult, bound, changes_of
from grpo_dist.tools.plan.simulation import simulate
from tests.support.fakes import config
from tests.support.plans import printed, wide

ASSUMED = Assumptions(prompt_tokens=100)


def try_splits(c, cluster):
    """Yield the changes of each split, with its option or a reason."""
    setting = build_setting(c, parse_cluster(cluster), ASSUMED)
    for changes in changes_of(c, setting):
        yield changes, option_or_reason(c, changes, setting)


@pytest.mark.parametrize(
    "model, gpus",
    [({"tensor_parallel_size": 4}, 4), ({"num_workers": 2, "gpu_share": 0.5}, 1), ({"num_workers": 2}, 2)],
)
def test_splits_leave_a_reward_model_its_whole_gpus(model, gpus):
    judge = {"name": "judge", "path": "Qwen/Qwen2.5-0.5B"} | model
    c = wide(rewards={"models": [judge]}, max_staleness=1)
    splits = [x for x, _ in try_splits(c, "1x8xH100") if x["cluster.placement"] == "separate"]
    used = [
        x["policy.num_workers"] + x["rollout.num_workers"] * x["rollout.tensor_parallel_size"] for x in splits
    ]
    assert max(used) == 8 - gpus


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_bound_of_a_split_holds_where_dynamic_sampling_discards_groups(staleness):
    c = wide(
        dynamic_sampling={"enabled": True},
        bench={"lengths": {"kind": "fixed"}},
        batch={"prompts_per_step": 64, "samples_per_prompt": 8},
        max_staleness=staleness,
    )
    fitting = [option for _, option in try_splits(c, "1x4xL40S") if isinstance(option, Option)]
    assert len(fitting) >= 3
    for option in fitting:
        assert planned(option, steps=2).simulated.tokens_per_s <= 1.05 * bound(option)


def test_a_plan_in_which_no_split_can_run_gives_the_reasons():
    plan = make_plan(wide(), "1x2xH100", ASSUMED)
    attempts = [replace(t, best=None, fitting=0, why="a reason") for t in plan.search.tried]
    output = printed(replace(plan, search=SearchResult(None, attempts)))
    assert "tried at this batch and staleness" in output and "splits of GPUs can run: a reason" in output
    assert "best" not in output


def test_a_part_of_a_large_cluster_has_the_step_of_the_whole():
    c = config(
        model={"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": True}, max_staleness=1,
        batch={"prompts_per_step": 256, "samples_per_prompt": 4}, sampling={"max_new_tokens": 512},
        rollout={"num_workers": 16}, policy={"num_workers": 16}, rewards={"num_workers": 8},
        algorithm={"kl": {"coef": 0.0}},
    )  # fmt: skip
    scenario = option_of(c, build_setting(c, parse_cluster("4x8xH100"), ASSUMED)).scenario
    part = scenario.as_part(64)
    assert (part.parts, part.config.rollout.num_workers, part.config.batch.prompts_per_step) == (4, 4, 64)
    assert part.as_part(64) is part
    whole, partial = simulate(scenario), simulate(part)
    assert partial.step_s == pytest.approx(whole.step_s, rel=0.03)
    assert partial.tokens == pytest.approx(whole.tokens, rel=0.03) and partial.samples == whole.samples
