"""The options of a server: the flags of `mlc-amd serve`, and their values for the parts of the server."""

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from mlc_amd.runtime.options import MANY, Checked, Option
from mlc_amd.tools.options import Quiet


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Checked):
    """body_timeout: seconds within which the body of a request must arrive."""

    host: Annotated[str, Option("address to listen on; 0.0.0.0 for all of this machine's")] = "127.0.0.1"
    port: Annotated[int, Option("port to listen on; 0 takes a free one", low=0, high=65535)] = 8080
    uds: Annotated[str | None, Option("listen on this Unix domain socket instead")] = None
    alias: Annotated[str | None, Option(
        "name that clients know the model by, if there is one model", also=("-a",))] = None  # fmt: skip
    api_key: Annotated[tuple[str, ...], Option(
        "key that clients must send; may be repeated. Others can read command lines: better use $MLC_AMD_API_KEY or "
        "--api-key-file")] = ()  # fmt: skip
    api_key_file: Annotated[str | None, Option("file of keys, one a line")] = None
    cors_origins: Annotated[tuple[str, ...], Option(
        "origin of web pages that may use the server from a browser, such as https://example.com, or *; may be "
        "repeated")] = ()  # fmt: skip
    models_max: Annotated[int, Option(
        "models that are loaded at a time; the least recently used one makes room", low=1, high=MANY)] = 1  # fmt: skip
    idle_unload: Annotated[float | None, Option(
        "time after which a model that nobody uses is unloaded", unit="seconds", default="never",
        low=1, high=MANY)] = None  # fmt: skip
    max_requests: Annotated[int, Option(
        "requests that are answered or wait at a time; more get the status 503", low=1, high=MANY)] = 256  # fmt: skip
    max_body: Annotated[int, Option("largest request", unit="MiB", low=1, high=MANY)] = 16
    allow_image_urls: Annotated[bool, Option(
        "fetch images whose http or https URL a request has, from public addresses only")] = False  # fmt: skip
    timeout: Annotated[float, Option(
        "time that an answer may take; 0: any time", unit="seconds", low=0, high=MANY)] = 600.0  # fmt: skip
    slot_save_path: Annotated[str | None, Option(
        "folder of the files that /slots/ID?action=save writes and restore reads", default="no such requests",
    )] = None  # fmt: skip
    quiet: Quiet = False
    ray: Annotated[str | None, Option(
        "deploy the server on this Ray cluster: auto (the one that this machine belongs to), HOST:PORT, "
        "ray://HOST:PORT, or local (a new one, of this machine). --host and --port are those of its head node",
    )] = None  # fmt: skip
    replicas: Annotated[int | None, Option(
        "with --ray: how many servers share the requests, each with a GPU or CPUs of its own",
        default="1", low=1, high=MANY)] = None  # fmt: skip
    body_timeout: float = 30.0

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The names that are allowed in the Host header, in addition to IP addresses and localhost; None: all."""
        return (self.host, "") if self.local and not self.api_key else None

    @property
    def body(self) -> int:
        """`max_body` in bytes."""
        return self.max_body << 20

    @property
    def limit(self) -> float | None:
        """`timeout` in seconds; None: no limit."""
        return self.timeout or None
