"""Whether a run fits the cluster that it would get. Starts no actor."""

from __future__ import annotations

from typing import NamedTuple

import ray

from actors.connection import (
    address_of,
    check_grows_no_more,
    connect,
    is_this_machine,
    local_resources,
    resources_of,
)
from actors.placement.demands import describe, placement
from actors.placement.fitting import bundles, too_large
from actors.placement.reservation import expected
from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.policy.deepspeed_config import check_offload


class Fit(NamedTuple):
    """``words`` describe the placement of a run; ``gpus`` counts those of the whole cluster."""

    words: str
    gpus: int


def fit(config: Config, *, training: bool = True) -> Fit:
    """Check that a training run, or an evaluation, fits the cluster, before anything is started.

    Raises UserError when it takes more than the cluster has.
    """
    if address_of(config.cluster) == "local" and not ray.is_initialized():
        check_grows_no_more(config.cluster)
        found, here, has = None, True, local_resources(config.cluster)
    else:
        owns = connect(config.cluster)
        found = expected(config.cluster)
        here, has = is_this_machine() and config.cluster.grows_to is None, resources_of(found, shared=True)
        if owns:
            ray.shutdown()
    if training and here:
        check_offload(config.policy)  # on another cluster, every rank checks its own machine
    demands = placement(config, has, training=training)
    if found is not None and (problem := too_large(bundles(demands), found)):
        raise UserError(f"cluster: {problem}")
    return Fit(describe(demands, has), has.gpus)
