# pyright: reportMissingImports=false
"""`mlc-amd serve --ray`: deploys the server on a Ray cluster, waits for a signal, and deletes it again.

In: a cluster's address, the models and options of tools/commands/serve.py. ray_replicas.py has what runs on the
cluster.

The first SIGINT or SIGTERM stops the server: new requests get 503, answers in progress are finished, then the
application is deleted. A second signal also ends the answers in progress.
"""

import logging
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from ray.util import list_named_actors

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.manifest import Manifest
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools import target as targets
from mlc_amd.tools.hub import models
from mlc_amd.tools.server.options import ServeOptions
from mlc_amd.tools.server.ray_replicas import Gateway, Replica, Router
from mlc_amd.tools.terminal import display

APPLICATION = "mlc-amd"
_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Requests that the server's own limit does not count: pages, metrics, and requests that are answered with 503.
_UNCOUNTED = 64
# Seconds that answers may take after someone else has deleted the application, if --timeout sets no limit.
_LAST_ANSWERS = 3600.0
# Seconds within which a connection to the cluster's address must be established.
_REACHABLE = 10.0
# Seconds between two checks of an application that is being deleted; seconds that the deletion may take.
_POLL, _DELETED = 0.1, 60.0
# How often a replica is started that fails immediately: the next attempt may use another machine.
_TRIES = 3


@dataclass(frozen=True)
class Deployment:
    """What is deployed. models: how to load each model, by the names that clients use; only their `model` differs."""

    models: Mapping[str, LoadOptions]
    options: ServeOptions

    @property
    def replicas(self) -> int:
        return self.options.replicas or 1


def run(deployment: Deployment) -> None:
    """Serves until a signal stops it. Raises UserError if the cluster cannot be reached or fails, or if a replica
    cannot be started."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _interrupt()
    try:
        with _cluster(deployment.options.ray or ""):
            _run(deployment)
    except (RayError, RayServeException) as error:
        if isinstance(error, RayTaskError):  # the error that was raised on the cluster
            raise
        raise UserError(f"the Ray cluster fails: {_line(error)}; look into its logs, and at `ray status`") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt() -> None:
    """Turns signals into KeyboardInterrupt."""
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)


def _run(deployment: Deployment) -> None:
    serving, local = False, deployment.options.ray == "local"
    try:
        where = _start(deployment.options.host, deployment.options.port)
        count = f"{deployment.replicas} replica{'s' if deployment.replicas > 1 else ''}"
        display.message(f"starting {count}, which load {next(iter(deployment.models))}")
        gateway = _deploy(deployment)
        serving = True
        display.message(f"serving {', '.join(deployment.models)} with {count} at {where}")
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            _stop(gateway)
    finally:
        with _quiet():
            if serving or not local:  # a local cluster ends with everything that runs on it
                _delete(loading=not serving)
            ray.shutdown()  # Ray prints messages until then


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides Ray's output within the block: its threads report failures that are caused by the end of the
    application."""
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            yield
    finally:
        log.setLevel(level)


def _stop(gateway: DeploymentHandle) -> None:
    try:
        if count := gateway.stop.remote().result():
            display.message(f"stopping after {count} requests (once more: at once)")
        gateway.end.remote().result()
    except KeyboardInterrupt:
        gateway.end.remote(now=True).result()
        display.message("stopped at once")
        raise


# ---- the cluster


def _check_address(address: str) -> None:
    """Raises UserError if nothing answers at the address. Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--ray is {address!r}: give auto, local, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHABLE).close()
    # OverflowError, UnicodeError: an impossible port number or host name
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"no Ray cluster at {address}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a new cluster would otherwise report to Ray's makers
    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **more)
    except Exception as error:  # Ray has no exception class for a node that does not start in time
        ray.shutdown()
        if address == "local":
            folder = os.path.join(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray/session_latest/logs")
            hint = f"if this machine is busy, try again; Ray's logs are in {folder}"
            raise UserError(f"Ray does not start on this machine: {_line(error)} ({hint})") from error
        hint = "`ray start --head` starts one; if it wants a token, set RAY_AUTH_MODE=token"
        raise UserError(f"cannot connect to a Ray cluster at {address}: {_line(error)} ({hint})") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _interrupt()  # Ray has installed its own handlers
    try:
        yield
    finally:
        ray.shutdown()


def _line(error: BaseException) -> str:
    """The first line of a message, without the final punctuation."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def _start(host: str, port: int) -> str:
    """Starts Ray Serve if it does not run. Returns the address at which it accepts requests. If it was running already,
    this need not be the given address."""
    try:
        where = HTTPOptions(host=host, port=port)
        serve.start(proxy_location="HeadOnly", http_options=where, logging_config=_LOGGING)
    except (RayError, TimeoutError, RuntimeError) as error:
        raise UserError(f"Ray Serve cannot listen on {host} port {port}: choose another with --port") from error
    client = _get_global_client()
    assert client is not None, "serve.start has made it"
    used = client.http_config
    if (used.host, used.port) != (host, port):
        display.message("Ray Serve runs on this cluster already: --host and --port do not count")
    return f"http://{f'[{used.host}]' if ':' in (used.host or '') else used.host}:{used.port}"


def _deploy(deployment: Deployment) -> DeploymentHandle:
    """Deploys the application. Returns the gateway when all replicas accept requests."""
    resources, changed = _share(deployment)
    options = deployment.options
    requests, limit = options.max_requests + _UNCOUNTED, options.limit or _LAST_ANSWERS
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": limit,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": _TRIES,
        "logging_config": _LOGGING,
    }
    replicas = serve.deployment(Replica).options(
        num_replicas=deployment.replicas,
        ray_actor_options=resources,
        max_ongoing_requests=requests,
        request_router_config={"request_router_class": Router},
        **common,
    )
    gateway = serve.deployment(Gateway).options(
        ray_actor_options={"num_cpus": 0}, max_ongoing_requests=deployment.replicas * requests, **common
    )
    load = partial(_load, {name: replace(one, **changed) for name, one in deployment.models.items()})
    bound = replicas.bind(list(deployment.models), load, options)
    try:
        return serve.run(gateway.bind(bound, options), name=APPLICATION)
    except (RayError, RayServeException, RuntimeError) as error:
        raise UserError(f"the replicas cannot be started: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Why a replica could not be started. Ray quotes the traceback; its last line is `module.Class: text`."""
    application = serve.status().applications.get(APPLICATION)
    told = [one.message for one in application.deployments.values() if one.message] if application else []
    last = [text.strip().splitlines()[-1] for text in (str(error), *told) if text.strip()][-1]
    return re.sub(r"^[\w.]+: ", "", last)


def _load(known: Mapping[str, LoadOptions], name: str, gpus: tuple[int, ...]) -> Engine | Encoder:
    """The engine of a model, in a replica. gpus: the numbers of the GPUs that Ray assigned. HIP shows a process only
    these, and numbers them from 0. Vulkan shows all GPUs, in the same order."""
    options = known[name]
    if gpus and options.device is None:
        compiled = _compiled(options)
        kind = compiled["target"]["kind"] if compiled else targets.resolve(options.target, options.arch)[0]
        options = replace(options, devices=gpus if kind == "vulkan" else tuple(range(len(gpus))))
    return models.load_any(options)


def _compiled(options: LoadOptions) -> Manifest | None:
    """The manifest of a model, if this machine has it compiled."""
    path = models.local(options.model) if options.model else None
    return Artifact.open(path).manifest if path and path.is_dir() else None


def gpus_each(options: LoadOptions) -> int:
    """The number of GPUs that a replica needs for a model."""
    compiled = _compiled(options)
    parts = compiled["gpus"] if compiled else options.gpus
    return max(len(options.devices), len(options.tensor_split), parts or 1)


def _share(deployment: Deployment) -> tuple[dict[str, float], dict[str, Any]]:
    """What a replica takes of the cluster, in Ray's terms, and the changes of the loading options that follow: if the
    cluster has GPUs, as many as the models need; otherwise, as many CPUs as each replica can have."""
    load = next(iter(deployment.models.values()))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    target, threads, count = load.target, load.threads, deployment.replicas
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if target not in ("auto", "cpu") or (target == "auto" and gpus):
        each = max(map(gpus_each, deployment.models.values()))
        _warn(gpus, count * each, "GPUs")
        return {"num_gpus": each, "num_cpus": threads or 1}, {}
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    each = threads or most_each(cpus, count)
    _warn(sum(cpu // each for cpu in cpus) * each, count * each, "CPUs")
    return {"num_cpus": each}, {"target": "cpu", "threads": each}


def most_each(cpus: Sequence[int], replicas: int) -> int:
    """The number of CPUs that each replica can have on nodes with these numbers of CPUs; at least 1."""
    sizes = range(max(cpus, default=1), 0, -1)
    return next((each for each in sizes if sum(count // each for count in cpus) >= replicas), 1)


def _warn(there: int, needed: int, what: str) -> None:
    if there < needed:
        display.message(f"the cluster has {there} {what} for {needed}: waiting for more nodes (Ctrl-C ends this)")


def _delete(loading: bool) -> None:
    """Deletes the application, and stops Ray Serve if no other application uses it. loading: whether some replicas are
    still loading their model; there are no requests then, and Ray would wait until the models are loaded."""
    try:
        serve.delete(APPLICATION, _blocking=not loading)
        end = time.monotonic() + _DELETED
        while APPLICATION in serve.status().applications:
            if time.monotonic() > end:
                raise TimeoutError("it does not end")
            _kill_replicas()  # repeatedly, as Ray starts new replicas until it has noticed the deletion
            time.sleep(_POLL)
        if not serve.status().applications:
            serve.shutdown()
    except (RayError, RayServeException, RuntimeError, TimeoutError) as error:
        display.message(f"the application {APPLICATION} may be left on the cluster: {_line(error)}")


def _kill_replicas() -> None:
    for actor in list_named_actors(all_namespaces=True):
        if actor["name"].startswith(f"SERVE_REPLICA::{APPLICATION}#"):
            with suppress(ValueError, RayError):  # it has ended meanwhile
                ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
