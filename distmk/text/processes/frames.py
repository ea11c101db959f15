"""Tasks of a limited process, and its answers, as frames on a socket.

The answer is text, so that whatever the task does to that process, this one reads no more than text from it.
"""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass

_SIZE = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one task may take. `cpu_s`: CPU time; the rendering of a conversation of 1,000 messages takes about 10 ms.
    `memory_bytes`: address space that the process may take beyond its present one. `output_chars`: the text; a million tokens
    are about 4 MB.
    """

    cpu_s: float = 2.0
    memory_bytes: int = 512 << 20
    output_chars: int = 16 << 20


class Outcome(enum.Enum):
    """How a task ended."""

    TEXT = b"t"  # with the text that was asked for
    INVALID = b"i"  # the source is no template, or no grammar
    REFUSED = b"r"  # the template calls raise_exception
    MISFIT = b"m"  # the template fails with this conversation
    STOPPED = b"s"  # it exceeds a limit


@dataclass(frozen=True)
class Answer:
    """`text`: what was asked for, or for the other outcomes the reason."""

    outcome: Outcome
    text: str

    def encode(self) -> bytes:
        return self.outcome.value + self.text.encode("utf-8", "surrogatepass")

    @staticmethod
    def decode(payload: bytes) -> Answer:
        """Undo `encode`."""
        return Answer(Outcome(payload[:1]), payload[1:].decode("utf-8", "surrogatepass"))


def send(sock: socket.socket, payload: bytes) -> None:
    """Send one frame. OSError: the other side is gone, or does not read in the socket's time."""
    sock.sendall(_SIZE.pack(len(payload)))
    sock.sendall(payload)


def receive(sock: socket.socket) -> bytes:
    """The next frame. EOFError: the other side has closed; OSError: it is gone, or does not write in the socket's time."""
    return _receive(sock, _SIZE.unpack(_receive(sock, _SIZE.size))[0])


def _receive(sock: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        arrived = sock.recv(min(_CHUNK_BYTES, size - len(received)))
        if not arrived:
            raise EOFError
        received += arrived
    return bytes(received)
