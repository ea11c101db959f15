"""Options of `distmk serve` for HTTP: TLS, a proxy's path, and the template of conversations."""

from __future__ import annotations

import argparse
import os
import re
import ssl
from pathlib import Path
from typing import Any

from distmk.errors import UsageError, one_line, shown
from distmk.text.chat.files import MAX_TEMPLATE_BYTES, check_template_size
from distmk.user_files import exists, read_whole

_ROOT_PATH = re.compile(r"(/[\w.~%-]+)+")
_TEMPLATE_SIGNS = ("{", "}", "\n")  # text with one of them is a template, and no path


def add_http_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument(
        "--ssl-certfile", metavar="FILE", help="the certificate of the server, in PEM format: serve HTTPS"
    )
    group.add_argument("--ssl-keyfile", metavar="FILE", help="the certificate's private key, in PEM format")
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="the path under which a proxy in front shows this server, such as /llm",
    )
    group.add_argument(
        "--chat-template",
        metavar="TEMPLATE",
        help="a file with a chat template, or the template in one line, instead of the model's",
    )


def http_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerConfig` for these options. UsageError: one of them is wrong."""
    _check_tls(arguments.ssl_certfile, arguments.ssl_keyfile)
    root_path = arguments.root_path.rstrip("/")
    if root_path and not _ROOT_PATH.fullmatch(root_path):
        raise UsageError(f"--root-path is {shown(arguments.root_path)}; expected a path such as /llm")
    return {
        "ssl_certfile": arguments.ssl_certfile,
        "ssl_keyfile": arguments.ssl_keyfile,
        "root_path": root_path,
        "chat_template": _read_template(arguments.chat_template),
    }


def _check_tls(certificate: str | None, key: str | None) -> None:
    """UsageError: they do not make a server of HTTPS."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise UsageError("--ssl-certfile and --ssl-keyfile go together; give both, or none for plain HTTP")
    for option, name in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if not os.path.isfile(name) or not os.access(name, os.R_OK):
            raise UsageError(f"{option} {shown(name)} is no file that can be read")
    try:
        # Without a password function, OpenSSL would ask for the key's on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--ssl-certfile {shown(certificate)} with --ssl-keyfile {shown(key)} is no certificate in PEM format with its "
            f"key, which must not be encrypted ({one_line(error)})"
        ) from None


def _read_template(given: str | None) -> str | None:
    """The text of a template. UsageError: it is none."""
    if given is None:
        return None
    if any(sign in given for sign in _TEMPLATE_SIGNS):
        text, what = given, "--chat-template"
    elif given and exists(Path(given), UsageError):
        text, what = _text(Path(given)), f"--chat-template {given}"
    else:
        raise UsageError(
            f"--chat-template {shown(given)} is neither a file nor a template such as '{{{{ messages }}}}'"
        )
    from distmk.text.chat.sandbox import compile_template

    try:
        compile_template(check_template_size(text, what))
    except UsageError:
        raise
    except Exception as error:  # jinja2's own, and whatever else a damaged template makes of it
        line = f" at line {error.lineno}" if hasattr(error, "lineno") else ""
        raise UsageError(f"{what} is no chat template{line}: {one_line(error)}") from None
    return text


def _text(path: Path) -> str:
    try:
        return read_whole(path, MAX_TEMPLATE_BYTES, UsageError, "give a chat template").decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; a chat template is text") from None
