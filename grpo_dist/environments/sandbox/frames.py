"""The messages between the three processes of an episode.

owner (asyncio)  -- Request -->  keeper  -- token, payload -->  worker, which runs the program
                 <-- Answer ---          <-- token, reply ----

Lengths come first, so no message is searched for its end. The keeper never parses what the worker wrote; the
owner reads it as untrusted JSON.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

TOKEN_BYTES = 16
OUTCOMES = ("ok", "timeout", "memory", "died", "error")

# number of the request, seconds that it may take, CPU seconds that all may take, bytes of the payload
REQUEST = struct.Struct("!16sddQ")
# number of the request, index of OUTCOMES, wall clock and CPU seconds, bytes of the body and of the output
ANSWER = struct.Struct("!16sBddQQ")
# token of the request, bytes that follow: the payload, or the reply
INNER = struct.Struct("!16sQ")


def pack_answer(
    number: bytes, outcome: str, body: bytes, output: bytes, seconds: float, cpu_s: float
) -> bytes:
    """Return what a keeper sends for request ``number``.

    Args:
        outcome: one of `OUTCOMES`.
        body: JSON of the worker's reply where ``outcome`` is "ok", else a reason.
        output: what was written to descriptors 1 and 2, cut.
        seconds: wall clock of the request.
        cpu_s: CPU seconds of all processes, once they have been ended; 0 before.
    """
    sizes = len(body), len(output)
    return ANSWER.pack(number, OUTCOMES.index(outcome), seconds, cpu_s, *sizes) + body + output


async def receive_soon(channel: socket.socket, size: int) -> bytes:
    """Like `read`, of a socket that does not block."""
    loop, buffer = asyncio.get_running_loop(), bytearray()
    while len(buffer) < size:
        piece = await loop.sock_recv(channel, min(size - len(buffer), 1 << 20))
        if not piece:
            raise EOFError
        buffer += piece
    return bytes(buffer)


def read(descriptor: int, size: int) -> bytes:
    """Read exactly ``size`` bytes. Raises EOFError if the other end closes before."""
    buffer = bytearray()
    while len(buffer) < size:
        piece = os.read(descriptor, min(size - len(buffer), 1 << 20))
        if not piece:
            raise EOFError
        buffer += piece
    return bytes(buffer)


def write(descriptor: int, message: bytes) -> None:
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class KeptOutput:
    """The first and last bytes of what is written, at most ``size`` bytes together."""

    def __init__(self, size: int) -> None:
        self._first_size, self._last_size = size - size // 2, size // 2
        self._first, self._last, self._total = bytearray(), bytearray(), 0

    def add(self, piece: bytes) -> None:
        self._total += len(piece)
        room = self._first_size - len(self._first)
        self._first += piece[:room]
        self._last += piece[room:] if room > 0 else piece
        if len(self._last) > 4 * self._last_size + (1 << 16):  # not at each piece, which may be one byte
            self._cut()

    def bytes(self) -> bytes:
        """Return what is kept, with a mark where something is missing."""
        self._cut()
        missing = self._total - len(self._first) - len(self._last)
        mark = f"\n[... {missing} bytes of output cut ...]\n".encode() if missing else b""
        return bytes(self._first) + mark + bytes(self._last)

    def _cut(self) -> None:
        if len(self._last) > self._last_size:
            del self._last[: len(self._last) - self._last_size]
