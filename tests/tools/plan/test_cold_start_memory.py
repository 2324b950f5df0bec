"""Memory of supervised training before a run: counted by `check` and by `plan`."""

import pytest
from rich.console import Console

from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import Sizes, cold_start, is_trained_first
from grpo_dist.tools.plan.models import published
from grpo_dist.tools.plan.options import Assumptions
from grpo_dist.tools.plan.placement import cold_start_problem
from grpo_dist.tools.plan.report import print_plan
from tests.support import fakes


def config(**sft):
    return fakes.config(
        model={"path": "sft", "gradient_checkpointing": True},
        sft={"model": "Qwen/Qwen2.5-1.5B", "data": "pairs.jsonl"} | sft,
        policy={"num_workers": 4},
        batch={"prompts_per_step": 4},
    )


def needed(c, model, **changes):
    return cold_start(c.sft, model, Sizes.of(c, gpu=True), **changes)


def test_states_are_four_float32_numbers_per_weight_and_activations_are_those_of_the_batch():
    model = published("Qwen/Qwen2.5-1.5B")
    one, two = (needed(config(batch_size=n), model, longest=64) for n in (4, 8))
    states = sum(one.parts[name] for name in ("weights", "gradients", "optimiser"))
    assert states == 16 * model.parameters
    assert two.parts["activations"] == pytest.approx(2 * one.parts["activations"])
    bounded = needed(config(batch_size=4, max_length=64), model)
    assert bounded.total == one.total  # if the rows are unknown, the longest possible


def test_what_does_not_fit_names_the_keys_to_lower():
    model, cluster = published("Qwen/Qwen2.5-1.5B"), parse_cluster("1x8xH100")
    small, large = (needed(config(), model, longest=n) for n in (16, 4096))
    assert cold_start_problem(small, cluster) is None
    said = cold_start_problem(large, cluster)
    assert said.startswith("cold start: ") and "lower `sft.batch_size` or `sft.max_length`" in said


def test_a_plan_counts_the_cold_start():
    assert is_trained_first(config().model, config().sft) and not is_trained_first(
        fakes.config().model, fakes.config().sft
    )
    made = make_plan(config(), "1x8xH100", Assumptions(prompt_tokens=50), splits=False)
    console = Console(record=True, width=200, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_plan(made, console)
    said = console.export_text()
    assert "cold start, before all workers: " in said and "48 rows of `sft.max_length` = 1024 tokens" in said
    assert "warning: cold start: " in said and "`check` uses the real lengths of the rows" in said
