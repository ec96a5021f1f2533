"""Checks the addresses given with `--server`, and the API key that servers are sent."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.load import short_repr

KEY = "MUGRPO_SERVER_KEY"
"""Environment variable with the key that every server gets as `Authorization: Bearer`."""


def check_address(text: str, key: str | None) -> str:
    """Returns the base URL in `text`, without `/v1` or a slash at its end.

    `key` is the API key that the server would be sent, None if there is none. Raises UserError for an address that
    cannot be used, and for a key that may not be sent to it or that no HTTP header can have.
    """
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"--server {short_repr(text)}: not a URL ({error})") from None
    if parts.scheme not in ("http", "https") or not host or not text.isascii() or not text.isprintable():
        raise UserError(
            f"--server {short_repr(text)}: not an http or https URL with a host, in printable ASCII; write a URL such "
            "as http://127.0.0.1:8000"
        )
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"--server: the address of {host} holds a user or a password; give a key "
            f"in the environment variable {KEY} instead"
        )
    if parts.query or parts.fragment:
        raise UserError(f"--server {short_repr(text)}: has a query or a fragment; give the server's base URL alone")
    if key and parts.scheme == "http" and not is_loopback(host):
        raise UserError(
            f"--server {text}: the key of {KEY} would cross the network unencrypted; take https, a tunnel "
            "(ssh -L) to this machine, or unset the key"
        )
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY}: the key holds characters that no HTTP header may have; use printable ASCII alone")
    return text.rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
