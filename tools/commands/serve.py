"""`mlc-amd serve`: models over HTTP."""

import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc_amd.runtime import extras
from mlc_amd.runtime.cache.kv_types import KvType
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.tools.hub import models
from mlc_amd.tools.terminal import display

if TYPE_CHECKING:
    from mlc_amd.runtime.engine.engine import Engine
    from mlc_amd.tools.server.service import Settings

SHORT = {"q": "quiet"}
_KEY_VARIABLE = "MLC_AMD_API_KEY"


def run(
    model: tuple[str, ...] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    uds: str | None = None,
    api_key: tuple[str, ...] = (),
    api_key_file: str | None = None,
    cors_origins: tuple[str, ...] = (),
    models_max: int = 1,
    idle_unload: float | None = None,
    max_requests: int = 256,
    max_body: int = 16,
    timeout: float = 600.0,
    kv_tokens: int | None = None,
    kv_memory: str | None = None,
    draft: str | None = None,
    quiet: bool = False,
    ray: str | None = None,
    replicas: int | None = None,
    target: str = "auto",
    arch: str = "native",
    ctx: int | None = None,
    kv_type: KvType | None = None,
    threads: int | None = None,
    device: str | None = None,
    verify: bool = False,
    n_cpu_moe: int = 0,
) -> None:
    """Serves models over HTTP, with the APIs of OpenAI, Anthropic and ollama, and a chat page for browsers.

    The first model is loaded at once and is the default; others are loaded when a request names them. SIGTERM or Ctrl-C
    ends the server after the answers in progress, the second one at once.

    Args:
        model: artifact folders, GGUF files, or OWNER/REPO:QUANT of huggingface.co (compiled on first use), each with
            NAME= before it if clients shall know it by another name; the bundled demo model if omitted.
        host: address to listen on; 0.0.0.0 for all of this machine's.
        port: port to listen on; 0 takes a free one.
        uds: listen on this Unix domain socket instead.
        api_key: key that clients must send; may be repeated. Others can read command lines: better use
            $MLC_AMD_API_KEY or --api-key-file.
        api_key_file: file of keys, one a line.
        cors_origins: origin of web pages that may use the server from a browser, such as https://example.com, or *;
            may be repeated.
        models_max: models that are loaded at a time; the least recently used one makes room.
        idle_unload: seconds after which a model that nobody uses is unloaded (default: never).
        max_requests: requests that are answered or wait at a time; more get the status 503.
        max_body: largest request in MiB.
        timeout: seconds that an answer may take; 0: any time.
        kv_tokens: tokens that a model's KV cache holds, of all answers together.
        kv_memory: how much memory a model's KV cache takes instead, as 4G or 512M, or auto: what the device has left
            (default: auto where one model is loaded at a time, else enough for one context).
        draft: decode several tokens a step, guessed by a smaller model with the same vocabulary (named as a model is),
            or, for "lookup", taken from the text so far, or, for "mtp", by the model's own layer for that, if it has
            one. Answers are the same; steps guess as much as pays.
        quiet: log no requests.
        ray: deploy the server on this Ray cluster: auto (the one that this machine belongs to), HOST:PORT, ray://HOST:PORT,
            or local (a new one, of this machine). --host and --port are those of its head node.
        replicas: with --ray: how many servers share the requests, each with a GPU or CPUs of its own (default: 1).
        target: target that a GGUF file is compiled for: auto (rocm if AMD's HIP runtime works, else vulkan on a GPU,
            else cpu), cpu, rocm or vulkan.
        arch: CPU, GPU or Vulkan profile that a GGUF file is compiled for: native (this machine) or a name, see
            `mlc-amd compile --help`.
        ctx: KV cache size in tokens, for a GGUF file (default: the model's context length, at most 4096).
        kv_type: type of the KV cache, for a GGUF file: f16, or q8_0, which takes half of the memory (default: f16).
        threads: number of CPU threads (default: all cores).
        device: GPU for targets rocm and vulkan: its number in `mlc-amd doctor`, or part of its name (default:
            $MLC_AMD_DEVICE, else the best one).
        verify: also verify the checksum of the weights, which reads all of them.
        n_cpu_moe: keep the experts of the first N layers in host memory, where the GPU reads them across the bus: for
            mixtures of experts that do not fit its memory (`mlc-amd inspect` says which N is enough).
    """
    for module in ("starlette", "uvicorn", "httptools", "prometheus_client", *(("ray",) if ray is not None else ())):
        extras.require(module)
    count = 1 if replicas is None else replicas
    _check(port=port, models_max=models_max, max_requests=max_requests, max_body=max_body, replicas=count)
    if ray is None and replicas is not None:
        raise UsageError("--replicas is for --ray: say on which cluster")
    if ray is not None and (uds is not None or port == 0):
        raise UsageError("--ray needs a --port: Ray's server takes no Unix domain socket, and chooses no port")
    from mlc_amd.tools.server.service import Settings

    options: dict[str, Any] = {
        "target": target,
        "arch": arch,
        "ctx": ctx,
        "kv_type": kv_type,
        "threads": threads,
        "device": device,
        "verify": verify,
        "n_cpu_moe": n_cpu_moe,
        "kv_tokens": kv_tokens,
        "kv_memory": "auto" if kv_tokens is None and kv_memory is None and models_max == 1 else kv_memory,
        "draft": draft,
    }
    sources = named(model)
    keys = read_keys(api_key, api_key_file)
    local = uds is not None or is_loopback(host)
    settings = Settings(
        keys=keys,
        origins=cors_origins,
        hosts=(host, "") if local and not keys else None,
        body=max_body << 20,
        limit=timeout or None,
        requests=max_requests,
        quiet=quiet,
    )
    if not keys and not local:
        display.message("warning: everybody who reaches this address can use the server: give it an --api-key-file")
    if ray is None:
        loaders = {name: partial(models.load_engine, source, **options) for name, source in sources.items()}
        _serve_here(loaders, models_max, idle_unload, settings, listen(host, port, uds), uds)
        return
    try:
        from mlc_amd.tools.server import ray_cluster
    except ImportError as error:  # ray without its extra `serve`
        raise extras.absence("ray") from error
    deployment = ray_cluster.Deployment(_absolute(sources), options, models_max, idle_unload, settings, count)
    ray_cluster.run(ray, host, port, deployment)


def _serve_here(
    loaders: Mapping[str, Callable[[], "Engine"]],
    most: int,
    idle: float | None,
    settings: "Settings",
    listener: socket.socket,
    uds: str | None,
) -> None:
    """Serves in this process until a signal has stopped it."""
    from mlc_amd.tools.server.app import make_app
    from mlc_amd.tools.server.library import Library
    from mlc_amd.tools.server.lifecycle import allow_connections, make_server
    from mlc_amd.tools.server.service import Service

    allow_connections(settings.requests)
    library = Library(loaders, most, idle)
    service = Service(library, settings)
    try:
        library.add(library.names[0], loaders[library.names[0]]())
        where = f"unix:{uds}" if uds else url(listener)
        ready = partial(display.message, f"serving {', '.join(loaders)} at {where}")
        make_server(make_app(service), service, ready).run(sockets=[listener])
    finally:
        listener.close()
        if uds:
            Path(uds).unlink(missing_ok=True)


def _absolute(sources: Mapping[str, str | None]) -> dict[str, str | None]:
    """What models of this machine are called in other folders, and where $MLC_AMD_MODEL is not set."""
    given = {name: source or os.environ.get("MLC_AMD_MODEL") for name, source in sources.items()}
    paths = {name: Path(source).expanduser() for name, source in given.items() if source}
    return {
        name: str(paths[name].resolve()) if name in paths and paths[name].exists() else given[name] for name in given
    }


def _check(**values: int) -> None:
    for name, value in values.items():
        least = 0 if name == "port" else 1
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be at least {least}")


def named(given: tuple[str, ...]) -> dict[str, str | None]:
    """The models by the names that clients use, each with what `models.load_engine` takes: of paths the file's or the
    folder's name is the name, of a hub's model what the user wrote. NAME=MODEL names it otherwise."""
    found: dict[str, str | None] = {}
    for one in given or (None,):
        name, equals, source = (one or "").partition("=")
        if not equals or Path(one or "").expanduser().exists():
            source = one
            name = models.default_model().stem if one is None else one
            if one is not None and Path(one).expanduser().exists():
                path = Path(one).expanduser().resolve()
                name = path.name if path.is_dir() else path.stem
        if name in found:
            raise UsageError(f"two models are called {name}: name one of them with NAME=MODEL")
        found[name] = source
    return found


def read_keys(given: tuple[str, ...], file: str | None) -> tuple[str, ...]:
    """The API keys of the command line, of a file and of the environment. UsageError for an empty one."""
    keys = list(given)
    if any(not key.strip() for key in keys):
        raise UsageError("--api-key is empty")
    if file is not None:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UsageError(f"--api-key-file {file} has no keys")
        keys += found
    if key := os.environ.get(_KEY_VARIABLE, "").strip():
        keys.append(key)
    return tuple(dict.fromkeys(keys))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, uds: str | None) -> socket.socket:
    """A socket that is bound, before a model takes its time to load. UserError if it cannot be."""
    try:
        if uds is not None:
            return _listen_locally(Path(uds))
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        # With the protocol: asyncio switches Nagle's algorithm off where it is known to be TCP. It would hold answers
        # back for 40 ms, until the client's delayed acknowledgement.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        return listener
    except OSError as error:
        place = uds or f"{host} port {port}"
        raise UserError(f"cannot listen on {place}: {error.strerror or error}; choose another with --port") from error


def _listen_locally(path: Path) -> socket.socket:
    """A Unix domain socket that only this user can connect to. A socket that a dead server has left is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)):
                path.unlink()
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    return listener


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
