"""Which workers share GPUs: reward models with shares of one, engines that take turns with policy ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from grpo_dist.config import RolloutConfig
from grpo_dist.errors import UserError

_ROUNDING = 1e-6  # three times 1/3 is a GPU


class Devices(NamedTuple):
    """GPUs on one node, by the identifiers that CUDA_VISIBLE_DEVICES takes."""

    node: str
    gpus: tuple[str, ...]


def packed(gpus: Sequence[float], copies: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Return which workers, by index, share a GPU or have GPUs of their own; the largest share first, each on
    the first GPU with enough left. Of equal shares the first copies of all models come first, so that the
    copies of one model are on different GPUs where others fill these.

        (0.25, 2, 0.5, 0.75, 0.5)           -> (1,), (0, 3), (2, 4)
        (0.5, 0.5, 0.5, 0.5), (0, 1, 0, 1)  -> (0, 2), (1, 3)
    """
    copies = copies or [0] * len(gpus)
    found: list[list[int]] = []
    for i in sorted(range(len(gpus)), key=lambda i: (-gpus[i], copies[i])):
        fits = (own for own in found if sum(gpus[j] for j in (*own, i)) <= 1 + _ROUNDING)
        own = next(fits, None)
        if own is None:
            found.append(own := [])
        own.append(i)
    return [tuple(sorted(own)) for own in found]


def whole_gpus(gpus: Iterable[float]) -> int:
    """Return the GPUs that workers of a group of `packed` have together."""
    return math.ceil(sum(gpus) - _ROUNDING)


def smaller_shared(ranks: int, rollout: RolloutConfig, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield overrides with which at most ``ranks`` policy ranks, one a GPU, and the engines share at most
    ``gpus``; the most ranks first. A step's samples that ``ranks`` can share are shared by a divisor of them.

        ranks 4, 4 engines, 3 GPUs -> policy.num_workers and rollout.num_workers 2, then 1
    """
    width, engines = rollout.tensor_parallel_size, rollout.num_workers
    for fewer in (n for n in range(min(ranks, gpus), 0, -1) if ranks % n == 0):
        narrower = max(n for n in range(1, 1 + min(width, fewer)) if width % n == 0)
        changes = {
            "policy.num_workers": (fewer, ranks),
            "rollout.num_workers": (min(engines, fewer // narrower), engines),
            "rollout.tensor_parallel_size": (narrower, width),
        }
        yield {key: now for key, (now, before) in changes.items() if now != before}


def share_out(held: Sequence[Devices], engines: int, tensor_parallel_size: int) -> list[Devices]:
    """Return the devices of each of ``engines``, out of those the policy ranks hold; an engine's are on one
    node.

    Two nodes of two GPUs each, two engines of two: [a/0, b/0, a/1, b/1] -> [a/0,1  b/0,1].
    """
    by_node: dict[str, list[str]] = {}
    for node, gpus in held:
        by_node.setdefault(node, []).extend(gpus)
    size = tensor_parallel_size
    found = [
        Devices(node, tuple(gpus[i : i + size]))
        for node, gpus in by_node.items()
        for i in range(0, len(gpus) - size + 1, size)
    ]
    if len(found) < engines:
        ranks = ", ".join(f"{len(gpus)} on {node}" for node, gpus in by_node.items())
        raise UserError(
            f"`rollout.num_workers` = {engines} engines of `rollout.tensor_parallel_size` = {size} GPUs of "
            f"one node each: the policy's GPUs ({ranks}) have room for {len(found)}; lower either, or set "
            "cluster.placement=separate"
        )
    return found[:engines]


def colocated_ranks(held: Sequence[Devices], engines: Sequence[Devices]) -> list[int]:
    """Return for each process of ``engines``, one a GPU, the policy rank that holds its GPU in ``held``."""
    ranks = {(node, gpu): rank for rank, (node, gpus) in enumerate(held) for gpu in gpus}
    return [ranks[node, gpu] for node, gpus in engines for gpu in gpus]
