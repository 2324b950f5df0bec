"""Where a process group meets is said to its members alone.

rank 0                                  others
asks for a proof of the secret   <-->   give it, and ask for rank 0's    (introduction.py)
listens on a free port
that port, and a question         -->   join the store there             (rendezvous.py)
all                                     answer the question over the group itself
"""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass, replace

from actors.transfer.connections import Connections, Seat
from grpo_dist.policy.ranks import Rank

_WORD = struct.Struct("<I32s")  # port of the store, question


@dataclass(frozen=True, slots=True)
class Meeting:
    """``listening``: rank 0's descriptor of its socket at ``port``; None for the others."""

    port: int
    question: bytes
    listening: int | None


def meet(seat: Seat, timeout_s: float) -> Meeting:
    """Collective over all seats of a group. Raises ConnectionError or TimeoutError where somebody is not
    there, or does not know the secret.
    """
    connections = Connections(seat, timeout_s)
    try:
        if seat.rank != 0:
            port, question = _WORD.unpack(connections.hear(_WORD.size))
            return Meeting(port, question, None)
        listening, question = socket.create_server((seat.host, 0)), secrets.token_bytes(32)
        port = listening.getsockname()[1]
        connections.tell(_WORD.pack(port, question))
        return Meeting(port, question, listening.detach())
    finally:
        connections.close()


def met(rank: Rank) -> Rank:
    """``rank`` with the meeting point of its group. Collective over the ranks."""
    if not rank.secret:
        return rank
    found = meet(Seat(rank.host, rank.port, rank.index, rank.world_size, rank.secret), rank.timeout_s)
    return replace(rank, port=found.port, question=found.question, listening=found.listening)
