"""Downloads images from the web for clients. Clients must not be able to reach hosts through this server that only the
server can reach.

In: a URL (http, https). Out: the bytes. Raises UserError for URLs and hosts that are not allowed, for responses that
are not image files, and if a limit of time or size is exceeded.

Names are resolved here, and the connection goes to the address that was checked. So it is no use to change the address
of a name after the check. Redirects are checked in the same way. Proxies, cookies and credentials are not used.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from mlc_amd.runtime.errors import UserError, one_line, shorten
from mlc_amd.runtime.images.pictures import MOST_BYTES

_SECONDS = 10.0  # limit for one image, including its redirects
_REDIRECTS = 3
_HEADERS: dict[str | bytes, str | bytes] = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif",
    "Accept-Encoding": "identity",
}
# Limit of simultaneous downloads, so that slow hosts do not occupy all threads. Further ones wait.
_SLOTS = threading.BoundedSemaphore(4)


class _Refused(Exception):
    """The host has an address that is not public."""


def fetch(url: str, where: str) -> bytes:
    """The file at `url`. where: its name in errors."""
    if not _SLOTS.acquire(timeout=_SECONDS):
        raise UserError(f"{where} cannot be fetched now: too many images are being fetched, try again later")
    try:
        backend = _Backend(time.monotonic() + _SECONDS)
        with httpcore.ConnectionPool(network_backend=backend) as pool:
            for _ in range(_REDIRECTS + 1):
                data, location = _get(pool, _checked(url, where), where)
                if location is None:
                    return data
                url = urljoin(url, location)
        raise UserError(f"{where} redirects more than {_REDIRECTS} times: send the image itself")
    except _Refused:
        raise UserError(f"{where} has an address that is not of the public web: send the image itself") from None
    except (httpcore.TimeoutException, TimeoutError):
        raise UserError(f"{where} did not arrive within {_SECONDS:.0f} s: send the image itself") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError) as error:
        why = one_line(str(error) or type(error).__name__, 100)
        raise UserError(f"{where} cannot be fetched ({why}): send the image itself") from None
    finally:
        _SLOTS.release()


def _checked(url: str, where: str) -> str:
    """The URL, if it is allowed. Raises UserError otherwise."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.username is None and parts.port != 0
        valid = valid and url.isascii() and url.isprintable() and " " not in url
    except ValueError:  # an invalid port, or brackets
        valid = False
    if not valid:
        raise UserError(f"{where} is {shorten(url)}: it must be like https://example.com/a.png")
    return url


def _get(pool: httpcore.ConnectionPool, url: str, where: str) -> tuple[bytes, str | None]:
    """(body, None), or (b"", target of the redirect)."""
    with pool.stream("GET", url, headers=_HEADERS) as response:
        if response.status in (301, 302, 303, 307, 308):
            found = dict((key.lower(), value) for key, value in response.headers).get(b"location", b"")
            return b"", found.decode("latin-1")
        if response.status != 200:
            raise UserError(f"{where} has the status {response.status}: check the URL")
        data = bytearray()
        for chunk in response.iter_stream():
            data += chunk
            if len(data) > MOST_BYTES:
                raise UserError(f"{where} is larger than {MOST_BYTES >> 20} MiB: make it smaller")
        return bytes(data), None


def is_public(address: str) -> bool:
    """Whether an IP address is a public one. Addresses that embed another address, or are translated to one, are
    not."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    v6 = isinstance(ip, ipaddress.IPv6Address)
    if v6 and (ip not in ipaddress.ip_network("2000::/3") or ip.sixtofour or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class _Backend(httpcore.SyncBackend):
    """Only connects to public addresses, and only until the deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"no such host: {error}") from error
        addresses = [str(where[0]) for *_, where in found]
        if not addresses or not all(map(is_public, addresses)):
            raise _Refused
        stream = super().connect_tcp(addresses[0], port, _left(self._deadline), local_address, socket_options)
        return _Stream(stream, self._deadline)


class _Stream(httpcore.NetworkStream):
    """A connection that cannot be used after the deadline."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline))
        return _Stream(stream, self._deadline)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    """The seconds until the deadline. Raises TimeoutError if it has passed."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
