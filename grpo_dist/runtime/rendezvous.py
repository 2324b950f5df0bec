"""The store where the processes of a torch process group meet, and the check that all of them belong to
it.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class NotAMember(RuntimeError):
    """A process of the group does not know its secret."""


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among the ranks of a process group, and the address where they meet.

    ``timeout_s``: longest any collective may take. ``secret``: of the group; empty: ranks need not prove that
    they know one. ``challenge``: the input of that proof, the same for all ranks. ``listening``: rank 0's
    descriptor of a socket at ``port``; None: rank 0 opens one.
    """

    index: int
    world_size: int
    host: str
    port: int
    timeout_s: float
    secret: bytes = field(default=b"", repr=False)
    challenge: bytes = field(default=b"", repr=False)
    listening: int | None = None


def meeting_point(rank: Rank) -> dist.TCPStore:
    """Connect to the store of the group. Rank 0 serves it at its own address alone; torch's own store would
    listen at every address of the machine.
    """
    serves = rank.index == 0
    listening = rank.listening if serves else None
    if serves and listening is None:
        listening = socket.create_server((rank.host, rank.port)).detach()
    return dist.TCPStore(
        rank.host,
        rank.port,
        rank.world_size,
        is_master=serves,
        timeout=timedelta(seconds=rank.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
        use_libuv=False,
    )


def find_local_address(host: str, port: int) -> str:
    """Return the address this machine uses to reach ``host``. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def check_members(
    gather: Callable[[Tensor], Sequence[Tensor]], secret: bytes, challenge: bytes, rank: int
) -> None:
    """Raise NotAMember unless every process of a group knows ``secret``.

    A collective: all ranks call it with the same new ``challenge``. ``gather`` takes this rank's uint8 [32]
    and returns those of all ranks. The store, gloo and NCCL authenticate no peer, so this check runs over
    them before anything else is sent.
    """
    own_proof = torch.frombuffer(bytearray(_proof(secret, challenge, rank)), dtype=torch.uint8)
    for other, proof in enumerate(gather(own_proof)):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(secret, challenge, other)):
            raise NotAMember(
                f"rank {other} of a process group does not know the secret of the group: another program "
                "of this network has joined in its place; nothing was sent to it"
            )


def _proof(secret: bytes, challenge: bytes, rank: int) -> bytes:
    return hmac.digest(secret, b"member" + challenge + rank.to_bytes(4, "little"), "sha256")
