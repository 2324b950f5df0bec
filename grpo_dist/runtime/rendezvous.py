"""Connect to a torch process group's store, and check that all of its processes are members."""

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
    """This process's rank in a process group, and the address of its store.

    ``timeout_s``: maximum time of a collective. ``secret``: the group's secret; empty: ranks need no proof.
    ``challenge``: the input of the proof, the same for all ranks. ``listening``: rank 0's socket descriptor
    at ``port``; None: rank 0 opens one.
    """

    index: int
    world_size: int
    host: str
    port: int
    timeout_s: float
    secret: bytes = field(default=b"", repr=False)
    challenge: bytes = field(default=b"", repr=False)
    listening: int | None = None


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at ``host``, an IP address of this machine. ``port`` 0 picks a free one.

    Others connect before this process accepts, hence the longest queue that the kernel allows.
    """
    return socket.create_server((host, port), family=_family(host), backlog=socket.SOMAXCONN)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def meeting_point(rank: Rank) -> dist.TCPStore:
    """Connect to the group's store. Rank 0 serves it only at ``rank.host``; by default, torch's store would
    listen at every address of the machine.
    """
    serves = rank.index == 0
    listening = rank.listening if serves else None
    if serves and listening is None:
        listening = listen(rank.host, rank.port).detach()
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
    """Return the address that this machine uses to reach ``host``. Sends no packet."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def check_members(
    gather: Callable[[Tensor], Sequence[Tensor]], secret: bytes, challenge: bytes, rank: int
) -> None:
    """Raise NotAMember unless every process of a group knows ``secret``.

    Collective: all ranks call it with the same new ``challenge``. ``gather`` takes this rank's uint8 [32] and
    returns the tensors of all ranks. The store, gloo and NCCL do not authenticate peers, so this check runs
    over them before anything else is sent.
    """
    rank_proof = torch.frombuffer(bytearray(_proof(secret, challenge, rank)), dtype=torch.uint8)
    for other, proof in enumerate(gather(rank_proof)):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(secret, challenge, other)):
            raise NotAMember(
                f"rank {other} of a process group does not know the secret of the group: another program "
                "on this network has joined instead; nothing was sent to it"
            )


def _proof(secret: bytes, challenge: bytes, rank: int) -> bytes:
    return hmac.digest(secret, b"member" + challenge + rank.to_bytes(4, "little"), "sha256")
