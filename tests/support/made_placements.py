"""Configurations with given worker counts, for tests of placement."""

from functools import partial

from actors.placement.fitting import nearest
from actors.placement.reservation import Reservation
from grpo_dist.config import Config


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
