"""The process group that carries weights: policy rank 0 is rank 0, the engines' worker processes are 1 .. N.

It stands beside each side's own process groups and knows nothing of models. Both kinds broadcast one flat
tensor.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """``broadcast`` sends rank 0's contents of ``flat`` into everyone's. ``device``: where ``flat`` has to
    lie.
    """

    device: torch.device

    def broadcast(self, flat: Tensor) -> None: ...
    def close(self) -> None: ...


class GlooTransport:
    """Broadcast over TCP, with a deadline on every operation: a dead peer raises, it never blocks for
    good.
    """

    device = torch.device("cpu")

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(
            host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        # Gloo's default is the address of the host's own name, which in containers often answers to nobody.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, port))]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("weights", self._store), rank, world_size, options
        )
        self._timeout = timeout

    def broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._group.broadcast([flat], options).wait(self._timeout)  # type: ignore[attr-defined]

    def close(self) -> None:
        del self._group, self._store


class NcclTransport:
    """Broadcast between GPUs through vLLM's own NCCL communicator."""

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        del timeout_s  # NCCL has none; the driver's deadline ends the actors
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._group = stateless_init_process_group(host, port, rank, world_size, self.device.index)

    def broadcast(self, flat: Tensor) -> None:
        self._group.broadcast(flat, src=0, stream=torch.cuda.current_stream())

    def close(self) -> None:
        self._group.destroy()


def open_transport(
    backend: str, host: str, port: int, *, rank: int, world_size: int, timeout_s: float
) -> Transport:
    kinds: dict[str, type[GlooTransport] | type[NcclTransport]] = {
        "gloo": GlooTransport,
        "nccl": NcclTransport,
    }
    return kinds[backend](host, port, rank=rank, world_size=world_size, timeout_s=timeout_s)


def free_port(host: str) -> int:
    """A port of ``host`` (this machine) that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _own_address(host: str, port: int) -> str:
    """The address this machine uses to reach ``host``. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
