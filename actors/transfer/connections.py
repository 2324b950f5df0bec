"""Authenticated connections between rank 0 of a transfer group and its other processes.

They carry control messages next to the weights. A process that dies is noticed at once, a host that is cut
off within `_SILENT_S`, and a process that hangs by the deadline.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from actors.transfer.handshake import admit, authenticate, receive
from grpo_dist.errors import TransferLost

_RETRY_S = 0.01  # between two attempts to reach rank 0, which may not listen yet
_IDLE_S, _PROBE_S, _PROBES = 4, 2, 4  # keep-alive of the kernel: a host answers also for a process that hangs
_SILENT_S = _IDLE_S + _PROBE_S * _PROBES
_YES, _NO = b"y", b"n"


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in a transfer group, whose rank 0 listens at ``host:port``.

    ``secret``: of the group, for the handshake; never written anywhere.
    """

    host: str
    port: int
    rank: int
    world_size: int
    secret: bytes = field(repr=False)


class Connections:
    """Rank 0's connections to all others, or the one of another rank to it."""

    def __init__(self, seat: Seat, timeout_s: float) -> None:
        self._timeout_s, self._is_first = timeout_s, seat.rank == 0
        if self._is_first:
            with socket.create_server((seat.host, seat.port)) as server:
                self._sockets = admit(server, seat.world_size - 1, seat.secret, timeout_s)
        else:
            self._sockets = [_connect(seat, timeout_s)]
        for each in self._sockets:
            each.settimeout(timeout_s)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(each)

    def send(self, message: bytes) -> None:
        """Send ``message`` over every connection."""
        with self._failures():
            for each in self._sockets:
                each.sendall(message)

    def receive(self, count: int) -> bytes:
        """Receive ``count`` bytes from every connection, and return the last one's."""
        received = b""
        with self._failures():
            for each in self._sockets:
                received = receive(each, count)
        return received

    def agree(self, own: bool) -> bool:
        """Return whether ``own`` is true in every process. All call it."""
        vote = _YES if own else _NO
        if not self._is_first:
            self.send(vote)
            return self.receive(1) == _YES
        with self._failures():
            votes = [vote, *(receive(each, 1) for each in self._sockets)]
        agreed = set(votes) == {_YES}
        self.send(_YES if agreed else _NO)
        return agreed

    def check(self) -> None:
        """Raise TransferLost when a process is gone. Reads nothing, and does not wait."""
        poll = select.poll()
        for each in self._sockets:
            poll.register(each, select.POLLRDHUP)
        if poll.poll(0):
            raise TransferLost("weight sync: a process of the transfer group is gone")

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TimeoutError(
                f"weight sync: a process of the transfer group sent nothing for {self._timeout_s:g} s"
            ) from error
        except ConnectionError as error:
            raise TransferLost(f"weight sync: a process of the transfer group is gone: {error}") from error


def _connect(seat: Seat, timeout_s: float) -> socket.socket:
    """Connect to rank 0, which may not listen yet, or may have closed this connection among pending ones."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((seat.host, seat.port), timeout=timeout_s)
            try:
                authenticate(connection, seat.secret)
            except OSError:
                connection.close()
                raise
            return connection
        except ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY_S)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
