"""HTTP to a server that is not trusted: replies are limited in size, and each request has one deadline.

Failures are of two kinds: `ServerTrouble` may pass, `ServerRefusal` will not.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from mugrpo_megatron.extras.servers.address import KEY, is_loopback
from mugrpo_megatron.files.json_text import parse_json

CONNECT_S = 10.0
"""Most seconds for making a connection, and for a whole GET request."""
SHORT_BODY = 1 << 20
"""Most bytes of a reply that holds no responses."""
DEAD_PEER = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""Options of the sockets: a machine that is cut off is noticed after 30 s, however long its answer may take."""
TEMPORARY = (404, 408, 409, 425, 500, 502, 504)
"""HTTP statuses after which the same request may succeed. vLLM answers 404 for a model that it does not serve yet."""
BUSY = (429, 503)


class ServerTrouble(Exception):
    """The server is away, busy or slow: the same request may succeed later, or at another server."""


class ServerBusy(ServerTrouble):
    """The server has too many requests: it may answer when it gets fewer at a time."""


class ServerRefusal(Exception):
    """The server cannot be used: its answer is wrong, or it refuses a request. The text is one sentence."""


class Connection:
    """Requests to one server, several at a time. Use it inside one event loop."""

    def __init__(self, url: str, timeout_s: float, most_requests: int) -> None:
        """Prepare requests to `url`, which `check_address` has checked. `timeout_s` bounds a POST request from its
        start to the last byte of its reply."""
        self.url, self._timeout_s = url, timeout_s
        key = os.environ.get(KEY)
        local = is_loopback(urlsplit(url).hostname or "")
        limits = httpx.Limits(max_connections=most_requests + 1, max_keepalive_connections=most_requests + 1)
        # httpx ignores the environment's proxies if it is given a transport, so a connection through a proxy does
        # without DEAD_PEER.
        proxied = not local and bool(getproxies())
        transport = None if proxied else httpx.AsyncHTTPTransport(limits=limits, socket_options=DEAD_PEER)
        # No compression: a small body could otherwise unpack to any size. By httpx's default no redirect is followed:
        # it could lead the key elsewhere.
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=limits,
            transport=transport,
            trust_env=not local,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Any | None:
        """The JSON value at `path`; None where the server has no such path. Raises what `post` raises."""
        status, body = await self._exchange("GET", path, None, SHORT_BODY, CONNECT_S)
        if status in (404, 405, 501):
            return None
        return self._value(path, status, body)

    async def post(self, path: str, content: dict[str, Any], most_bytes: int) -> Any:
        """Send JSON and return the reply's JSON value.

        Raises ServerTrouble if no whole reply came in time or its status is one of TEMPORARY or BUSY, and ServerRefusal
        for every other status but 200, for a certificate that is not trusted, and for a body that is not JSON, is
        compressed or has more than `most_bytes`.
        """
        status, body = await self._exchange("POST", path, content, most_bytes, self._timeout_s)
        return self._value(path, status, body)

    async def _exchange(
        self, method: str, path: str, content: dict[str, Any] | None, most_bytes: int, timeout_s: float
    ) -> tuple[int, bytes]:
        chunks, size = [], 0
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, self.url + path, json=content) as reply,
            ):
                if reply.headers.get("content-encoding", "identity") != "identity":
                    raise ServerRefusal(
                        f"{self.url}{path} compresses its reply, which was not asked for; turn compression off in "
                        "the server or in the proxy before it"
                    )
                async for chunk in reply.aiter_raw():
                    size += len(chunk)
                    if size > most_bytes:
                        raise ServerRefusal(
                            f"{self.url}{path} sends more than {most_bytes:,} bytes, the most that its answer may have"
                        )
                    chunks.append(chunk)
                return reply.status_code, b"".join(chunks)
        except TimeoutError:
            raise ServerTrouble(f"{self.url}{path}: the answer was not complete after {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ServerRefusal(
                    f"{self.url}: its certificate is not trusted here ({_first_line(error)}); name the file of its "
                    "certificate authority in SSL_CERT_FILE"
                ) from None
            raise ServerTrouble(f"{self.url}{path}: {_first_line(error)}") from None

    def _value(self, path: str, status: int, body: bytes) -> Any:
        if status in BUSY:
            raise ServerBusy(f"{self.url}{path}: HTTP status {status}{_reason(body)}")
        if status in TEMPORARY:
            raise ServerTrouble(f"{self.url}{path}: HTTP status {status}{_reason(body)}")
        if status in (401, 403):
            given = f"with the key of {KEY}: correct it" if os.environ.get(KEY) else f"without a key: set {KEY}"
            raise ServerRefusal(f"{self.url} refuses a request ({status}) {given}")
        if status != 200:
            raise ServerRefusal(f"{self.url}{path}: HTTP status {status}{_reason(body)}")
        try:
            return parse_json(body)
        except ValueError as error:
            raise ServerRefusal(f"{self.url}{path} answers with something that is not JSON ({error})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]


def _reason(body: bytes) -> str:
    """At most 300 characters of what a body says about an error, as ` (TEXT)`; "" if it says nothing."""
    try:
        value = parse_json(body)
    except ValueError:
        value = body.decode("utf-8", "replace")
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail") if key in value), "")
    text = " ".join(str(value).split())[:300]
    return f" ({text})" if text else ""
