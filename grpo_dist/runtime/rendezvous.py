"""The store where the processes of a torch process group meet, and the check that all of them belong to
it.
"""

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
    """Connect to the store at ``host:port``. Rank 0 serves it at this address alone; torch's own store would
    listen at every address of the machine. ``listening``: descriptor of rank 0's socket, if it is open
    already.
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
    """Return the address this machine uses to reach ``host``. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def check_members(
    gather: Callable[[Tensor], Sequence[Tensor]], secret: bytes, challenge: bytes, rank: int
) -> None:
    """Raise NotAMember unless every process of a group knows ``secret``.

    A collective: all ranks call it with the same new ``challenge``. ``gather`` takes this rank's uint8 [32]
    and returns those of all ranks. The store, gloo and NCCL authenticate nobody, so this check runs over them
    before anything else is sent.
    """
    own = torch.frombuffer(bytearray(_proof(secret, challenge, rank)), dtype=torch.uint8)
    for other, proof in enumerate(gather(own)):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(secret, challenge, other)):
            raise NotAMember(
                f"rank {other} of a process group does not know the secret of the group: another program "
                "of this network has joined in its place; nothing was sent to it"
            )


def _proof(secret: bytes, challenge: bytes, rank: int) -> bytes:
    return hmac.digest(secret, b"member" + challenge + rank.to_bytes(4, "little"), "sha256")
