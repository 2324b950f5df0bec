"""Where the processes of a torch process group meet, and how they prove that all of them belong there."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class NotAMember(RuntimeError):
    """A process of the group does not know its secret."""


def meeting_point(
    host: str, port: int, *, rank: int, world_size: int, timeout_s: float, listening: int | None = None
) -> dist.TCPStore:
    """The store at ``host:port``, which rank 0 keeps: there and at no other address of its machine, which is
    where torch's own would listen. ``listening``: descriptor of rank 0's socket there, if it has one already.
    """
    if rank == 0 and listening is None:
        listening = socket.create_server((host, port)).detach()
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening if rank == 0 else None,
        use_libuv=False,
    )


def own_address(host: str, port: int) -> str:
    """The address this machine uses to reach ``host``. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def check_members(
    gather: Callable[[Tensor], Sequence[Tensor]], secret: bytes, question: bytes, rank: int
) -> None:
    """Raises NotAMember unless every process of a group knows ``secret``. Collective, by ``gather``, which
    takes a uint8 [32] of this rank and gives those of all. ``question``: the same on all ranks, and new.

    The store and the connections of gloo and NCCL ask nobody for a secret, so this asks over them, before
    anything else is sent.
    """
    own = torch.frombuffer(bytearray(_proof(secret, question, rank)), dtype=torch.uint8)
    for other, proof in enumerate(gather(own)):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(secret, question, other)):
            raise NotAMember(
                f"rank {other} of a process group does not know the secret of the group, so that nothing is "
                "sent to it; another program of this network has joined in its place"
            )


def _proof(secret: bytes, question: bytes, rank: int) -> bytes:
    return hmac.digest(secret, b"member" + question + rank.to_bytes(4, "little"), "sha256")
