"""Who may join a transfer group: processes that know its secret, which travels inside calls of Ray alone.

    whoever listens                whoever connects
      question           ------>
                         <------     question of its own, proof
      proof              ------>

A proof is an HMAC over both questions: the secret itself is never sent, and what was overheard proves nothing
another time. Both sides give one, because each believes what the other says from then on.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time

_SIZE = 32  # bytes of a secret, a question, a proof
_STRANGERS = 64  # connections without a proof that may be open; of more the oldest is closed
_CONNECTS, _LISTENS = b"connects", b"listens"


def new_secret() -> bytes:
    return secrets.token_bytes(_SIZE)


class Stranger(ConnectionError):
    """The other side does not know the secret."""


class _Newcomer:
    """A connection that has not proven anything yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._question, self._heard = connection, secrets.token_bytes(_SIZE), b""
        connection.send(self._question)  # an empty buffer takes it whole

    def hear(self, secret: bytes) -> bool:
        """Whether the proof is complete, and answered. Raises ConnectionError where it is none."""
        piece = self._connection.recv(2 * _SIZE - len(self._heard))  # bounded: it does not block
        if not piece:
            raise Stranger("it closed the connection")
        self._heard += piece
        if len(self._heard) < 2 * _SIZE:
            return False
        question, proof = self._heard[:_SIZE], self._heard[_SIZE:]
        if not hmac.compare_digest(proof, _proof(secret, _CONNECTS, self._question, question)):
            raise Stranger("its proof is wrong")
        self._connection.send(_proof(secret, _LISTENS, self._question, question))
        return True


def admit(server: socket.socket, count: int, secret: bytes, timeout_s: float) -> list[socket.socket]:
    """The first ``count`` connections with a proof. Others are closed, and hold up nobody: who says nothing
    is not waited for. Raises TimeoutError.
    """
    end, admitted = time.monotonic() + timeout_s, list[socket.socket]()
    newcomers: dict[socket.socket, _Newcomer] = {}
    server.setblocking(False)
    try:
        while len(admitted) < count:
            for connection in _ready([server, *newcomers], end):
                try:
                    if connection is server:
                        connection, _ = server.accept()  # bounded: it does not block
                        newcomers[connection] = _Newcomer(connection)
                    elif newcomers[connection].hear(secret):
                        del newcomers[connection]
                        admitted.append(connection)
                except (ConnectionError, BlockingIOError):
                    newcomers.pop(connection, None)
                    if connection is not server:
                        connection.close()
            while len(newcomers) > _STRANGERS:
                oldest = next(iter(newcomers))
                del newcomers[oldest]
                oldest.close()
    except BaseException:
        for connection in admitted:
            connection.close()
        raise
    finally:
        for connection in newcomers:
            connection.close()
    return admitted


def introduce(connection: socket.socket, secret: bytes) -> None:
    """Join over ``connection``, whose timeout bounds it. Raises ConnectionError where the other side ends it
    or is not who it should be.
    """
    asked, own = receive(connection, _SIZE), secrets.token_bytes(_SIZE)
    connection.sendall(own + _proof(secret, _CONNECTS, asked, own))
    if not hmac.compare_digest(receive(connection, _SIZE), _proof(secret, _LISTENS, asked, own)):
        raise Stranger("who listens there does not belong to the transfer group")


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes. Raises ConnectionError where the other side ends before."""
    heard = b""
    while len(heard) < count:  # with a timeout, a socket gives what is there, also when told to wait for all
        piece = connection.recv(count - len(heard))  # bounded: by the socket's own timeout
        if not piece:
            raise ConnectionResetError("it closed the connection")
        heard += piece
    return heard


def _proof(secret: bytes, side: bytes, asked: bytes, answered: bytes) -> bytes:
    return hmac.digest(secret, side + asked + answered, "sha256")


def _ready(sockets: list[socket.socket], end: float) -> list[socket.socket]:
    """Those with something to read. Raises TimeoutError when there is none before ``end``."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        found = selector.select(max(0.0, end - time.monotonic()))
    if not found:
        raise TimeoutError("weight sync: not all processes of the transfer group joined it in time")
    return [key.fileobj for key, _ in found]  # type: ignore[misc]
