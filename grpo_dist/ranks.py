"""The policy's ranks: how they meet, and what they find out together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_dist.hardware import collective_backend, device_type
from grpo_dist.loss import Stats, is_maximum
from grpo_dist.rendezvous import meeting_point


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among the ranks, and where they meet. ``timeout_s``: longest any collective may take."""

    rank: int
    world_size: int
    host: str
    port: int
    timeout_s: float


def join(place: Rank) -> None:
    """Be this rank, from now on. Collective."""
    # Before deepspeed is imported: it reads them.
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=place.host, MASTER_PORT=str(place.port))
    if device_type() == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    rank, world_size = place.rank, place.world_size
    dist.init_process_group(
        collective_backend(),
        store=meeting_point(
            place.host, place.port, rank=rank, world_size=world_size, timeout_s=place.timeout_s
        ),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=place.timeout_s),
    )


def over_ranks(stats: Stats) -> Stats:
    """Statistics of all ranks together, in two collectives whatever their number."""
    names = sorted(stats)
    out: Stats = {}
    for maxima, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
        chosen = [name for name in names if is_maximum(name) == maxima]
        values = torch.stack([stats[name] for name in chosen])
        dist.all_reduce(values, op=operation)  # bounded: the process group has a deadline
        out |= dict(zip(chosen, values, strict=True))
    return out


def least_of_top(own: Tensor, share: float, device: torch.device) -> float:
    """The least of the greatest ``share`` of the values of all ranks together, at least one. Collective."""
    count = torch.tensor([own.numel()], device=device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)  # bounded: the process group has a deadline
    padded = torch.full((max(int(max(counts)), 1),), -torch.inf, device=device)
    padded[: own.numel()] = own.to(device)
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)  # bounded: the process group has a deadline
    total = sum(int(c) for c in counts)
    values = torch.cat(gathered).sort(descending=True).values[:total]
    return float(values[max(round(share * total), 1) - 1]) if total else 0.0
