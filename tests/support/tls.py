"""A certificate that signs itself, for servers on 127.0.0.1, made by OpenSSL's command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    file: Path
    key: Path
    encrypted_key: Path  # the same key, which needs a password


def make_certificate(folder: Path) -> Certificate:
    made = Certificate(folder / "certificate.pem", folder / "key.pem", folder / "encrypted.pem")
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    _openssl(*new, *name, "-keyout", str(made.key), "-out", str(made.file))
    _openssl("ec", "-in", str(made.key), "-aes256", "-passout", "pass:secret", "-out", str(made.encrypted_key))
    return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
