"""How the processes of a gloo group find its store, without telling its port to other processes.

rank 0                                  others
checks their proof               <-->   give a proof, check rank 0's     (handshake.py)
listens on a free port
sends that port, and a challenge  -->   join the store there             (rendezvous.py)
all                                     answer the challenge over the group itself
"""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass, replace

from actors.transfer.connections import Connections, Seat
from grpo_dist.runtime.rendezvous import Rank

_MESSAGE = struct.Struct("<I32s")  # port of the store, challenge


@dataclass(frozen=True, slots=True)
class GroupStore:
    """Where the store is. ``listening``: rank 0's descriptor of its socket at ``port``; None for the
    others.
    """

    port: int
    challenge: bytes
    listening: int | None


def agree_on_store(seat: Seat, timeout_s: float) -> GroupStore:
    """Agree on the port of the group's store. Collective over all seats of the group.

    Raises ConnectionError or TimeoutError when a process is missing or does not know the secret.
    """
    connections = Connections(seat, timeout_s)
    try:
        if seat.rank != 0:
            port, challenge = _MESSAGE.unpack(connections.receive(_MESSAGE.size))
            return GroupStore(port, challenge, None)
        listening, challenge = socket.create_server((seat.host, 0)), secrets.token_bytes(32)
        port = listening.getsockname()[1]
        connections.send(_MESSAGE.pack(port, challenge))
        return GroupStore(port, challenge, listening.detach())
    finally:
        connections.close()


def with_store(rank: Rank) -> Rank:
    """Return ``rank`` with the store of its group. Collective over the ranks."""
    if not rank.secret:
        return rank
    seat = Seat(rank.host, rank.port, rank.index, rank.world_size, rank.secret)
    found = agree_on_store(seat, rank.timeout_s)
    return replace(rank, port=found.port, challenge=found.challenge, listening=found.listening)
