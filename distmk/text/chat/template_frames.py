"""Tasks for a process that renders chat templates, and its answers, as frames on a socket.

The answer is text, so that whatever a template does, this process reads no more than text from it.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

_SIZE = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one rendering may take. `cpu_s`: CPU time; a conversation of 1,000 messages takes about 10 ms. `memory_bytes`:
    address space that the process may take beyond its present one. `output_chars`: the text; a million tokens are about 4 MB.
    """

    cpu_s: float = 2.0
    memory_bytes: int = 512 << 20
    output_chars: int = 16 << 20


@dataclass(frozen=True)
class Task:
    """A conversation to be rendered by the template `source`; plain values, as JSON has them."""

    source: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    limits: Limits

    def encode(self) -> bytes:
        """ValueError: a number has more digits than Python writes."""
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", "surrogatepass")

    @staticmethod
    def decode(payload: bytes) -> Task:
        """Undo `encode`."""
        fields = json.loads(payload.decode("utf-8", "surrogatepass"))
        return Task(**{**fields, "limits": Limits(**fields["limits"])})


class Outcome(enum.Enum):
    """How a rendering ended."""

    TEXT = b"t"  # the conversation as text
    INVALID = b"i"  # the source is no template
    REFUSED = b"r"  # the template calls raise_exception
    MISFIT = b"m"  # the template fails with this conversation
    STOPPED = b"s"  # it exceeds a limit


@dataclass(frozen=True)
class Answer:
    """`text`: the conversation, or for the other outcomes the reason."""

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
