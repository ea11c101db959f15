"""The secret of a job, and where it comes from; it keeps strangers from joining.

On one host no secret is needed: a Unix socket tells the user at its other end. Between hosts the secret comes from the
environment of the launcher or from a file that only its owner can read. MPI may carry it. torch's store may not,
because all users of a host can read it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from distmk.bootstrap.base import Member
from distmk.errors import UsageError
from distmk.user_files import open_regular

AUTHKEY_ENV = "DISTMK_AUTHKEY"
AUTHKEY_FILE_ENV = "DISTMK_AUTHKEY_FILE"
UNAUTHENTICATED_ENV = "DISTMK_UNAUTHENTICATED_BIND"

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LEAST_DIGITS = 32  # hexadecimal, of a key
_MOST_DIGITS = 1024
MAKE_KEY = 'python3 -c "import secrets; print(secrets.token_hex(32))"'


def read_authkey(env: Mapping[str, str]) -> bytes | None:
    """The key that the user gave to all ranks; None if there is none.

    UsageError: it is not a valid key, or others can read it.
    """
    if env.get(AUTHKEY_ENV):
        name, text = AUTHKEY_ENV, env[AUTHKEY_ENV]
    elif env.get(AUTHKEY_FILE_ENV):
        name, text = AUTHKEY_FILE_ENV, _read_private(env[AUTHKEY_FILE_ENV])
    else:
        return None
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) * 2 < _LEAST_DIGITS:
        raise UsageError(
            f"{name} must hold {_LEAST_DIGITS} hexadecimal digits or more, the same on every rank; make some by {MAKE_KEY}"
        )
    return key


def is_one_host(member: Member, hosts: Sequence[str]) -> bool:
    """Whether all ranks are on one host, as far as the launcher says; `hosts`: names of rank 0's host."""
    return member.local_size == member.world_size or all(host in _LOOPBACK for host in hosts)


def check_key(member: Member, is_private: bool, hosts: Sequence[str], env: Mapping[str, str]) -> bytes | None:
    """The user's key, or None if there is none. `is_private`: the launcher can carry a key that rank 0 makes.

    UsageError: the key is not valid, or there is none though the ranks need one.
    """
    key = read_authkey(env)
    may_do_without = is_private or bool(env.get(UNAUTHENTICATED_ENV)) or not member.is_spread
    if key is None and not may_do_without and not is_one_host(member, hosts):
        raise no_key_error()
    return key


def _read_private(path: str) -> str:
    """The text of a small file that only this user can read. UsageError: the file is something else."""
    try:
        fd = open_regular(Path(path), UsageError)
    except UsageError as error:
        raise UsageError(f"{AUTHKEY_FILE_ENV}: {error}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise UsageError(f"{AUTHKEY_FILE_ENV}={path} can be read by other users; chmod 600 it, and own it")
        return file.read(_MOST_DIGITS).decode(errors="replace")


def public_key() -> bytes:
    """The key of ranks that need no secret. Everybody knows it."""
    return hashlib.sha256(b"distmk without a secret").digest()


def no_key_error() -> UsageError:
    """The error to raise if ranks on several hosts have no key."""
    return UsageError(
        f"ranks on several hosts need a key, so that no stranger joins them; give every rank the same "
        f"{AUTHKEY_ENV}, made by {MAKE_KEY}, or {AUTHKEY_FILE_ENV} (launch/README.md, Who may join)"
    )
