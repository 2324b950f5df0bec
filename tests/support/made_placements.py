"""Configurations with given worker counts, for tests of placement."""

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
