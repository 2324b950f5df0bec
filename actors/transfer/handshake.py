"""Mutual HMAC handshake for connections of a transfer group; the secret is only sent over Ray.

    listening side               connecting side
      challenge          ------>
                         <------     own challenge, proof
      proof              ------>

A proof is an HMAC over both challenges: the secret itself is never sent, and a recorded proof is useless for
another connection. Both sides give one, because each trusts the messages of the other from then on.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time

_SIZE = 32  # bytes of a secret, a challenge, a proof
_MAX_PENDING = 64  # open connections without a proof; beyond that the oldest is closed
_CONNECTS, _LISTENS = b"connects", b"listens"


def new_secret() -> bytes:
    return secrets.token_bytes(_SIZE)


class Unauthenticated(ConnectionError):
    """The other side does not know the group's secret."""


class _Pending:
    """A connection that has not given its proof yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._challenge, self._received = connection, secrets.token_bytes(_SIZE), b""
        connection.send(self._challenge)  # an empty buffer takes it whole

    def read(self, secret: bytes) -> bool:
        """Read what has arrived; return whether the proof is complete, and answered. Raises ConnectionError
        when it is wrong.
        """
        piece = self._connection.recv(2 * _SIZE - len(self._received))  # bounded: it does not block
        if not piece:
            raise Unauthenticated("it closed the connection")
        self._received += piece
        if len(self._received) < 2 * _SIZE:
            return False
        challenge, proof = self._received[:_SIZE], self._received[_SIZE:]
        if not hmac.compare_digest(proof, _proof(secret, _CONNECTS, self._challenge, challenge)):
            raise Unauthenticated("its proof is wrong")
        self._connection.send(_proof(secret, _LISTENS, self._challenge, challenge))
        return True


def admit(server: socket.socket, count: int, secret: bytes, timeout_s: float) -> list[socket.socket]:
    """Return the first ``count`` connections with a valid proof, and close all others.

    A silent connection does not delay the others. Raises TimeoutError.
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

    The connection's timeout bounds it. Raises ConnectionError when the other side closes it or fails.
    """
    asked, own = receive(connection, _SIZE), secrets.token_bytes(_SIZE)
    connection.sendall(own + _proof(secret, _CONNECTS, asked, own))
    if not hmac.compare_digest(receive(connection, _SIZE), _proof(secret, _LISTENS, asked, own)):
        raise Unauthenticated("the listening process does not belong to the transfer group")


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly ``count`` bytes. Raises ConnectionError when the other side closes before."""
    received = b""
    while len(received) < count:  # with a timeout set, MSG_WAITALL may return less
        piece = connection.recv(count - len(received))  # bounded: by the socket's own timeout
        if not piece:
            raise ConnectionResetError("it closed the connection")
        received += piece
    return received


def _proof(secret: bytes, side: bytes, asked: bytes, answered: bytes) -> bytes:
    return hmac.digest(secret, side + asked + answered, "sha256")


def _ready(sockets: list[socket.socket], end: float) -> list[socket.socket]:
    """Return the sockets with something to read. Raises TimeoutError when there is none before ``end``."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        found = selector.select(max(0.0, end - time.monotonic()))
    if not found:
        raise TimeoutError("weight sync: not all processes of the transfer group joined it in time")
    return [key.fileobj for key, _ in found]  # type: ignore[misc]
