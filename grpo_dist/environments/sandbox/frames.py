"""Messages between the three processes of an episode.

owner (asyncio)  -- Request -->  keeper  -- token, payload -->  worker running the program
                 <-- Answer ---          <-- token, reply ----

Messages are length-prefixed. The keeper never parses the worker's output; the owner parses it as untrusted
JSON.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

TOKEN_BYTES = 16
OUTCOMES = ("ok", "timeout", "memory", "died", "error")

# request number, its time limit in seconds, CPU seconds for all requests, payload bytes
REQUEST = struct.Struct("!16sddQ")
# request number, index into OUTCOMES, wall-clock seconds, CPU seconds, body bytes, output bytes
ANSWER = struct.Struct("!16sBddQQ")
# request token, bytes of the payload or reply that follows
INNER = struct.Struct("!16sQ")


def pack_answer(
    number: bytes, outcome: str, body: bytes, output: bytes, seconds: float, cpu_s: float
) -> bytes:
    """Return a keeper's answer to request ``number``.

    Args:
        outcome: one of `OUTCOMES`.
        body: JSON of the worker's reply if ``outcome`` is "ok", else a reason.
        output: stdout and stderr, cut.
        seconds: wall-clock time of the request.
        cpu_s: CPU seconds of all processes after their end; 0 before.
    """
    sizes = len(body), len(output)
    return ANSWER.pack(number, OUTCOMES.index(outcome), seconds, cpu_s, *sizes) + body + output


async def receive_soon(channel: socket.socket, size: int) -> bytes:
    """Like `read`, for a non-blocking socket."""
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
    """The first and last bytes of an output, at most ``size`` bytes together."""

    def __init__(self, size: int) -> None:
        self._first_size, self._last_size = size - size // 2, size // 2
        self._first, self._last, self._total = bytearray(), bytearray(), 0

    def add(self, piece: bytes) -> None:
        self._total += len(piece)
        room = self._first_size - len(self._first)
        self._first += piece[:room]
        self._last += piece[room:] if room > 0 else piece
        if len(self._last) > 4 * self._last_size + (1 << 16):  # not for each piece, which may be one byte
            self._cut()

    def bytes(self) -> bytes:
        """Return the kept bytes, with a mark where output was cut."""
        self._cut()
        num_cut = self._total - len(self._first) - len(self._last)
        mark = f"\n[... {num_cut} bytes of output cut ...]\n".encode() if num_cut else b""
        return bytes(self._first) + mark + bytes(self._last)

    def _cut(self) -> None:
        if len(self._last) > self._last_size:
            del self._last[: len(self._last) - self._last_size]
