"""Inputs of plans and placements, and planned times of stages and reward models."""

from dataclasses import dataclass, field

from rich.console import Console

from actors.placement.reservation import Reservation
from grpo_dist.config import Config
from grpo_dist.config.rewards import OutcomeModelConfig
from grpo_dist.tools.plan import models
from grpo_dist.tools.plan.models import FrozenModel
from grpo_dist.tools.plan.rates import Reached
from grpo_dist.tools.plan.report import print_plan
from tests.support import fakes

# Configurations with fixed worker counts, for tests of placement.


def config(**changes):
    base = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}
    return Config.model_validate(base | changes)


def shape(ranks, engines, tensor_parallel=1, where="auto", **changes):
    return config(
        policy={"num_workers": ranks},
        rollout={"num_workers": engines, "tensor_parallel_size": tensor_parallel},
        cluster={"placement": where},
        **changes,
    )


async def reserved(wanted, demands):
    """Return the reservation of a training run."""
    return await Reservation.acquire(demands, wanted.cluster, name=wanted.name)


# Model sizes, for tests of the plan.


def model_of(config: Config) -> models.ModelShape:
    return models.model_of(config.model, config.sft, config.seed)


def wide(**changes):
    """Return a configuration of 16 x 4 samples of 1.5 billion parameters, for GPUs."""
    base = {
        "model": {"path": "Qwen/Qwen2.5-1.5B", "gradient_checkpointing": True},
        "batch": {"prompts_per_step": 16, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 256},
    }
    return fakes.config(**base | changes)


def printed(plan):
    """Return the command's output for a plan."""
    console = Console(record=True, width=200, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_plan(plan, console)
    return console.export_text()


# Times, for tests of the planned run.


@dataclass
class Times:
    """Stages of constant length. A decode step takes ``step`` plus ``each`` per token in the cache."""

    step: float = 0.1
    each: float = 0.0
    prefill: float = 0.0
    score: float = 0.5
    update: float = 2.0
    sync: float = 0.3
    reference: float = 0.0
    models: dict = field(default_factory=dict)  # seconds by reward model
    model: None = None  # sizes, read by `Rates` only
    reached: Reached = field(default_factory=lambda: Reached(sample_s=0.0, overhead_s=0.0))

    def decode_step_s(self, sequences, context):
        return self.step + self.each * context

    def prefill_s(self, tokens):
        return self.prefill * tokens

    def score_s(self, samples):
        return self.score

    def update_s(self, updates):
        return self.update

    def sync_s(self):
        return self.sync

    def turn_s(self):
        return 0.25

    def scoring_turn_s(self, model):
        return 0.0625 if model.is_reward_model else 0.125

    def resend_s(self):
        return 0.75

    def scoring_s(self, model, prompt, lengths):
        assert prompt == 20 and set(lengths) == {10}
        return self.models[model.settings.name] if model.is_reward_model else self.reference


def judges(**workers):
    """Return reward models with these numbers of workers; `Times` has their durations."""
    configs = [OutcomeModelConfig(name=name, path="-", num_workers=count) for name, count in workers.items()]
    return {"frozen": tuple(FrozenModel(None, settings) for settings in configs)}
