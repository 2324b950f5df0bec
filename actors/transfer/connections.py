"""Authenticated connections between rank 0 of a transfer group and its other processes.

They carry control messages alongside the weights. A dead process is noticed at once, a disconnected host
within `_SILENT_S`, and a hung process by the deadline.

Each begins with a mutual HMAC handshake; the secret is only sent over Ray:

    listening side               connecting side
      challenge          ------>
                         <------     its challenge, proof
      proof              ------>

A proof is an HMAC over both challenges: the secret itself is never sent, and a recorded proof is useless for
another connection. Both sides prove themselves, because each then trusts the other's messages.

The processes of a gloo group find its store this way, without revealing its port to other processes:

    rank 0                                  others
    listens on another free port
    sends that port, and a challenge  -->   join the store there             (rendezvous.py)
    all                                     answer the challenge over the group itself
"""

from __future__ import annotations

import errno
import hmac
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from grpo_dist.errors import TransferLost
from grpo_dist.runtime.rendezvous import Rank, listen

_SIZE = 32  # bytes of a secret, a challenge, a proof
_MAX_PENDING = 64  # limit of unproven connections; beyond it, the oldest is closed
_CONNECTS, _LISTENS = b"connects", b"listens"


def new_secret() -> bytes:
    return secrets.token_bytes(_SIZE)


class Unauthenticated(ConnectionError):
    """The other side does not know the group's secret."""


class _Pending:
    """A connection that has not proved itself yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._challenge, self._received = connection, secrets.token_bytes(_SIZE), b""
        connection.send(self._challenge)  # complete: the send buffer is empty

    def read(self, secret: bytes) -> bool:
        """Read the received bytes; return whether the proof is complete and answered. Raises ConnectionError
        for a wrong proof.
        """
        data = self._connection.recv(2 * _SIZE - len(self._received))  # bounded: it does not block
        if not data:
            raise Unauthenticated("it closed the connection")
        self._received += data
        if len(self._received) < 2 * _SIZE:
            return False
        challenge, proof = self._received[:_SIZE], self._received[_SIZE:]
        if not hmac.compare_digest(proof, _proof(secret, _CONNECTS, self._challenge, challenge)):
            raise Unauthenticated("its proof is wrong")
        self._connection.send(_proof(secret, _LISTENS, self._challenge, challenge))
        return True


def admit(server: socket.socket, count: int, secret: bytes, timeout_s: float) -> list[socket.socket]:
    """Accept the first ``count`` connections with a valid proof, and close all others.

    A silent connection does not delay the others. Raises TimeoutError, and TransferLost if ``server`` is shut
    down.
    """
    end, admitted = time.monotonic() + timeout_s, list[socket.socket]()
    pending: dict[socket.socket, _Pending] = {}
    server.setblocking(False)
    try:
        while len(admitted) < count:
            for connection in _ready([server, *pending], end):
                try:
                    if connection is server:
                        connection, _ = server.accept()  # bounded: it does not block
                        pending[connection] = _Pending(connection)
                    elif pending[connection].read(secret):
                        del pending[connection]
                        admitted.append(connection)
                except (ConnectionError, BlockingIOError):
                    pending.pop(connection, None)
                    if connection is not server:
                        connection.close()
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    raise TransferLost("weight sync: a process of the transfer group is gone") from error
            while len(pending) > _MAX_PENDING:
                oldest = next(iter(pending))
                del pending[oldest]
                oldest.close()
    except BaseException:
        for connection in admitted:
            connection.close()
        raise
    finally:
        for connection in pending:
            connection.close()
    return admitted


def authenticate(connection: socket.socket, secret: bytes) -> None:
    """Prove over ``connection`` that this process knows the secret, and check the other side's proof.

    The connection's timeout applies. Raises ConnectionError if the other side closes it or fails the proof.
    """
    their_challenge, challenge = receive(connection, _SIZE), secrets.token_bytes(_SIZE)
    connection.sendall(challenge + _proof(secret, _CONNECTS, their_challenge, challenge))
    expected = _proof(secret, _LISTENS, their_challenge, challenge)
    if not hmac.compare_digest(receive(connection, _SIZE), expected):
        raise Unauthenticated("the listening process does not belong to the transfer group")


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly ``count`` bytes. Raises ConnectionError if the other side closes too early."""
    received = b""
    while len(received) < count:  # with a timeout set, MSG_WAITALL may return less
        data = connection.recv(count - len(received))  # bounded: by the socket's timeout
        if not data:
            raise ConnectionResetError("it closed the connection")
        received += data
    return received


def _proof(secret: bytes, side: bytes, listener_challenge: bytes, connector_challenge: bytes) -> bytes:
    return hmac.digest(secret, side + listener_challenge + connector_challenge, "sha256")


def _ready(sockets: list[socket.socket], end: float) -> list[socket.socket]:
    """Return the readable sockets. Raises TimeoutError if there is none before ``end``."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        events = selector.select(max(0.0, end - time.monotonic()))
    if not events:
        raise TimeoutError("weight sync: not all processes of the transfer group joined it in time")
    return [key.fileobj for key, _ in events]  # type: ignore[misc]


_RETRY_S = 0.01  # between attempts to reach rank 0, which may not listen yet
_IDLE_S, _PROBE_S, _PROBES = 4, 2, 4  # TCP keep-alive: the kernel answers even for a hung process
_SILENT_S = _IDLE_S + _PROBE_S * _PROBES
_YES, _NO = b"y", b"n"


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in a transfer group, whose rank 0 listens at ``host:port``.

    ``secret``: the group's secret for the handshake; never written anywhere. ``listening``: rank 0's socket
    descriptor at ``port``; None: rank 0 opens one.
    """

    host: str
    port: int
    rank: int
    world_size: int
    secret: bytes = field(repr=False)
    listening: int | None = None


class Connections:
    """Rank 0's connections to all other ranks, or another rank's connection to rank 0."""

    def __init__(self, seat: Seat, timeout_s: float) -> None:
        self._timeout_s, self._is_first = timeout_s, seat.rank == 0
        if self._is_first:
            with _open_server(seat) as server:
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
        """Receive ``count`` bytes from every connection; return the last connection's bytes."""
        received = b""
        with self._failures():
            for each in self._sockets:
                received = receive(each, count)
        return received

    def agree(self, agrees: bool) -> bool:
        """Return whether ``agrees`` is true in every process. Collective."""
        vote = _YES if agrees else _NO
        if not self._is_first:
            self.send(vote)
            return self.receive(1) == _YES
        with self._failures():
            votes = [vote, *(receive(each, 1) for each in self._sockets)]
        agreed = set(votes) == {_YES}
        self.send(_YES if agreed else _NO)
        return agreed

    def check(self) -> None:
        """Raise TransferLost if a process is gone. Reads nothing, does not wait."""
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


def _open_server(seat: Seat) -> socket.socket:
    return listen(seat.host, seat.port) if seat.listening is None else socket.socket(fileno=seat.listening)


def _connect(seat: Seat, timeout_s: float) -> socket.socket:
    """Connect to rank 0; retry, as it may not listen yet or may have closed this pending connection."""
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


_MESSAGE = struct.Struct("<I32s")  # port of the store, challenge


@dataclass(frozen=True, slots=True)
class GroupStore:
    """The location of the group's store. ``listening``: rank 0's socket descriptor at ``port``, else None."""

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
        listening, challenge = listen(seat.host), secrets.token_bytes(32)
        port = listening.getsockname()[1]
        connections.send(_MESSAGE.pack(port, challenge))
        return GroupStore(port, challenge, listening.detach())
    finally:
        connections.close()


def open_store(rank: Rank) -> Rank:
    """Return ``rank`` with its group's store. Collective over the ranks."""
    if not rank.secret:
        return rank
    seat = Seat(rank.host, rank.port, rank.index, rank.world_size, rank.secret, rank.listening)
    store = agree_on_store(seat, rank.timeout_s)
    return replace(rank, port=store.port, challenge=store.challenge, listening=store.listening)
