"""`mlc-amd serve`: serves models over HTTP."""

import errno
import os
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mlc_amd.runtime import extras
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools.hub import models
from mlc_amd.tools.options import Defaults, Without
from mlc_amd.tools.server.options import ServeOptions
from mlc_amd.tools.terminal import display

if TYPE_CHECKING:
    from mlc_amd.runtime.engine.encoder import Encoder
    from mlc_amd.runtime.engine.engine import Engine

SHORT = {"q": "quiet"}
_KEY_VARIABLE = "MLC_AMD_API_KEY"


def run(
    model: tuple[str, ...] = (),
    *,
    options: ServeOptions,
    load: Annotated[LoadOptions, Without("model", "tuned"), Defaults(
        kv_memory="auto where one model is loaded at a time, else one sequence of full length")],
) -> None:  # fmt: skip
    """Serves models over HTTP, with the APIs of OpenAI, Anthropic and ollama, and a chat page for browsers.

    The first model is loaded at once and is the default; until it is there, requests get the status 503. Others are
    loaded when a request names them. SIGTERM or Ctrl-C ends the server after the answers in progress, the second one at
    once.

    Args:
        model: artifact folders, GGUF files, or OWNER/REPO:QUANT of huggingface.co (compiled on first use), each with
            NAME= before it to give it another name for clients; the bundled demo model if omitted.
    """
    on_ray = options.ray is not None
    optional = {"ray": on_ray, "httpcore": options.allow_image_urls}
    wanted = (module for module, used in optional.items() if used)
    for module in ("starlette", "uvicorn", "httptools", "prometheus_client", *wanted):
        extras.require(module)
    if options.slot_save_path is not None and not Path(options.slot_save_path).is_dir():
        raise UsageError(f"--slot-save-path {options.slot_save_path}: there is no such folder")
    if not on_ray and options.replicas is not None:
        raise UsageError("--replicas is for --ray: say on which cluster")
    if on_ray and (options.uds is not None or options.port == 0):
        raise UsageError("--ray needs a --port: Ray's server takes no Unix domain socket, and chooses no port")
    if load.kv_tokens is None and load.kv_memory is None and options.models_max == 1:
        load = replace(load, kv_memory="auto")
    sources = named(model, options.alias)
    options = replace(options, api_key=read_keys(options.api_key, options.api_key_file))
    if not options.api_key and not options.local:
        display.message("warning: everybody who reaches this address can use the server: give it an --api-key-file")
    if not on_ray:
        for source in filter(None, sources.values()):
            models.check_name(source)  # also of those that are loaded later
        loaders = {name: partial(models.load_any, replace(load, model=one)) for name, one in sources.items()}
        _serve_here(loaders, options, listen(options.host, options.port, options.uds))
        return
    try:
        from mlc_amd.tools.server import ray_cluster
    except ImportError as error:  # ray or the extra `serve` is not installed
        raise extras.absence("ray") from error
    models_there = {name: replace(load, model=one) for name, one in _absolute(sources).items()}
    ray_cluster.run(ray_cluster.Deployment(models_there, options))


def _serve_here(
    loaders: Mapping[str, Callable[[], "Engine | Encoder"]], options: ServeOptions, listener: socket.socket
) -> None:
    """Serves in this process until a signal stops it."""
    from mlc_amd.tools.server.app import make_app
    from mlc_amd.tools.server.library import Library
    from mlc_amd.tools.server.lifecycle import allow_connections, make_server
    from mlc_amd.tools.server.service import Service

    allow_connections(options.max_requests)
    library = Library(loaders, options.models_max, options.idle_unload, image_urls=options.allow_image_urls)
    service, first = Service(library, options), library.names[0]
    where = f"unix:{options.uds}" if options.uds else url(listener)
    ready = partial(display.message, f"serving {', '.join(loaders)} at {where}")
    server = make_server(make_app(service), service, ready, lambda: library.add(first, loaders[first]()))
    try:
        display.message(f"loading {first}; until then requests at {where} get the status 503")
        server.run(sockets=[listener])
    finally:
        listener.close()
        if options.uds:
            Path(options.uds).unlink(missing_ok=True)
    if server.failure:
        raise server.failure
    if service.loading:  # a signal came first; the loading thread cannot be interrupted
        display.message("stopped while loading")
        sys.stderr.flush()
        os._exit(0)


def _absolute(sources: Mapping[str, str | None]) -> dict[str, str | None]:
    """The names of models on this machine in a form that is valid in other folders, and without $MLC_AMD_MODEL."""
    given = {name: source or os.environ.get("MLC_AMD_MODEL") for name, source in sources.items()}
    paths = {name: Path(source).expanduser() for name, source in given.items() if source}
    return given | {name: str(path.resolve()) for name, path in paths.items() if path.exists()}


def named(given: tuple[str, ...], alias: str | None = None) -> dict[str, str | None]:
    """The models by the names that clients use, each with the argument of `models.load_any`. By default, a path's name
    is that of its file or folder, and a hub's model has the name that the user typed. NAME=MODEL, or the alias of a
    single model, changes it."""
    if alias is not None and (len(given) > 1 or not alias.strip()):
        raise UsageError("--alias is a name for one model: name each of several with NAME=MODEL")
    found: dict[str, str | None] = {}
    for one in given or (None,):
        name, equals, source = (one or "").partition("=")
        if not equals or "://" in name or Path(one or "").expanduser().exists():
            source = one
            name = models.default_model().stem if one is None else one
            if one is not None and Path(one).expanduser().exists():
                path = Path(one).expanduser().resolve()
                name = path.name if path.is_dir() else path.stem
        if name in found:
            raise UsageError(f"two models are called {name}: name one of them with NAME=MODEL")
        found[name] = source
    return found if alias is None else dict.fromkeys((alias,), *found.values())


def read_keys(given: tuple[str, ...], file: str | None) -> tuple[str, ...]:
    """The API keys from the command line, a file and the environment. Raises UsageError for an empty key."""
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


def listen(host: str, port: int, uds: str | None) -> socket.socket:
    """A bound socket. It is made before a model is loaded, which takes time. Raises UserError if it cannot be bound."""
    try:
        if uds is not None:
            return _listen_locally(Path(uds))
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        # The protocol must be given: asyncio only switches Nagle's algorithm off for a socket that is known to be TCP.
        # The algorithm would hold answers back for 40 ms, until the client's delayed acknowledgement.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        return listener
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
        raise UserError(f"cannot listen on {uds or f'{host} port {port}'}: {_advice(error, host, uds)}") from error


def _advice(error: OSError | UnicodeError, host: str, uds: str | None) -> str:
    """What is wrong with the address or path, and which option changes it."""
    if uds is not None:
        return f"{getattr(error, 'strerror', None) or error}; choose another file with --uds"
    if isinstance(error, socket.gaierror | UnicodeError) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        what = f"{host} is no address of this machine"
        return f"{what}; give --host 127.0.0.1 for this machine alone, --host 0.0.0.0 for all of its addresses"
    return f"{error.strerror or error}; choose another with --port"


def _listen_locally(path: Path) -> socket.socket:
    """A Unix domain socket to which only this user can connect. Replaces a socket that an ended server has left."""
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
