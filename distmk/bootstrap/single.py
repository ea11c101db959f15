"""A job of one rank: every exchange is with itself."""

from __future__ import annotations

import socket

from distmk.bootstrap.base import Bootstrap, Member


class SingleBootstrap(Bootstrap):
    """The only rank of its job. Other jobs may share its host: `local_rank` and `local_size` count one rank of each."""

    def __init__(self, timeout_s: float, local_rank: int | None = None, local_size: int | None = None) -> None:
        super().__init__(Member("single", 0, 1, local_rank, local_size), timeout_s)
        self.hostnames = [socket.gethostname()]

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        return [payload]

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        if payload is None:
            raise RuntimeError("rank 0 must give the payload of a broadcast")
        return payload

    def send_command(self, payload: bytes) -> None:
        self._check_usable()

    def next_command(self) -> bytes | None:
        raise self._refuse("next_command")

    def close(self) -> None:
        self._closed = True

    def abort(self, exit_code: int) -> None:
        self.close()
