"""The policy's ranks: joining the process group, and statistics over all of them."""

from __future__ import annotations

import os
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from grpo_dist.algorithms.ratios import Stats
from grpo_dist.policy.loss import is_maximum
from grpo_dist.runtime.hardware import collective_backend, device_type
from grpo_dist.runtime.rendezvous import Rank, check_members, find_local_address, meeting_point


def join(rank: Rank) -> None:
    """Join the process group as ``rank``. Collective. Raises NotAMember for a process without the group's
    secret.
    """
    # Before deepspeed is imported: it reads them.
    os.environ.update(RANK=str(rank.index), WORLD_SIZE=str(rank.world_size), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=rank.host, MASTER_PORT=str(rank.port))
    if device_type() == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    if name := _interface(rank.host, rank.port):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # else gloo resolves the host's name
    timeout = timedelta(seconds=rank.timeout_s)
    # For groups created without a timeout, as all of DeepSpeed's: else NCCL's get 10 minutes, others 30.
    distributed_c10d.default_pg_nccl_timeout = distributed_c10d.default_pg_timeout = timeout
    dist.init_process_group(
        collective_backend(),
        store=meeting_point(rank),
        rank=rank.index,
        world_size=rank.world_size,
        timeout=timeout,
    )
    if rank.secret:
        check_members(_gather, rank.secret, rank.challenge, rank.index)


def _gather(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.to(device_type())
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)  # bounded: the process group has a deadline
    return tensors


def _interface(host: str, port: int) -> str | None:
    """Return the network interface by which this machine reaches ``host``; None if it is ambiguous."""
    address = find_local_address(host, port)
    interfaces = [
        name for name, addresses in psutil.net_if_addrs().items() if address in [a.address for a in addresses]
    ]
    return interfaces[0] if len(interfaces) == 1 else None


def reduce_over_ranks(stats: Stats) -> Stats:
    """Combine the statistics of all ranks, in two collectives for any number of them. Collective."""
    names = sorted(stats)
    out: Stats = {}
    for maxima, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
        chosen = [name for name in names if is_maximum(name) == maxima]
        if not chosen:  # on no rank
            continue
        values = torch.stack([stats[name] for name in chosen])
        dist.all_reduce(values, op=operation)  # bounded: the process group has a deadline
        out |= dict(zip(chosen, values, strict=True))
    return out


def gather_values(values: Tensor, device: torch.device) -> Tensor:
    """Return the values of all ranks, [sum of their sizes], rank after rank, on ``device``. Collective."""
    count = torch.tensor([values.numel()], device=device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)  # bounded: the process group has a deadline
    padded = torch.zeros(max(int(max(counts)), 1), dtype=values.dtype, device=device)
    padded[: values.numel()] = values.to(device)
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)  # bounded: the process group has a deadline
    return torch.cat([part[: int(size)] for part, size in zip(gathered, counts, strict=True)])


def find_top_threshold(rank_values: Tensor, share: float, device: torch.device) -> float:
    """Return the least value in the top ``share`` of all ranks' values, at least one value. Collective."""
    values = gather_values(rank_values, device).sort(descending=True).values
    return float(values[max(round(share * len(values)), 1) - 1]) if len(values) else 0.0
