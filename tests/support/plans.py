"""What a plan and a placement start from."""

from functools import partial

from actors.placement.fitting import nearest
from actors.placement.reservation import Reservation
from grpo_dist.config import Config
from grpo_dist.tools.plan import models

# Configurations with given worker counts, for tests of placement.


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
    return await Reservation.acquire(
        demands, wanted.cluster, partial(nearest, wanted, training=True), name=wanted.name
    )


# Sizes of the model of a configuration, for tests of the plan.


def model_of(config: Config) -> models.ModelShape:
    return models.model_of(config.model, config.sft, config.seed)


# Overrides that a preset needs in addition to its own section.

PRESET_NEEDS = {
    "process": ["rewards.models=[{name: steps, path: /a/model, kind: classifier}]"],
    "turn": ["data.environment=calculator"],
}
