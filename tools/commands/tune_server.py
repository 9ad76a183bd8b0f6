"""`mlc-amd tune-server`: lets tuning runs on other machines use this machine's device; or keeps the list of such
machines."""

from typing import Annotated

from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import RunOptions, option_of
from mlc_amd.tools.options import Key, Tracker
from mlc_amd.tools.terminal import display

SHORT = {"d": "device"}


def run(
    *,
    tracker: Tracker = None,
    key: Key = None,
    device: Annotated[str | None, option_of(RunOptions, "device")] = None,
    host: str | None = None,
    tracker_only: str | None = None,
) -> None:
    """Measures candidates for `mlc-amd tune --runner rpc` on other machines, through TVM's RPC.

    One machine runs the tracker: `mlc-amd tune-server --tracker-only HOST:PORT`. Each machine that measures runs
        `mlc-amd tune-server --tracker HOST:PORT --key KEY`, once for each GPU. Then `mlc-amd tune MODEL.gguf ...
        --runner rpc --tracker HOST:PORT --key KEY` builds on its own machine and measures on all that have that key.

    TVM's RPC has no authentication: any client that reaches these ports can run any code on the machine. Use them in
    a network that you trust, or through ssh. On a CPU, --device is the number of threads.

    It needs TVM, as this command has it. For a machine without, such as a Steam Deck, or one that cannot be reached,
    there are kits: `mlc-amd tune --export-kit DIR` here, measure there, `mlc-amd tune --import-kit DIR` here.

    Args:
        host: the address where other machines reach this one (default: the one on the way to the tracker).
        tracker_only: measure nothing, but be the tracker at this HOST:PORT; 0.0.0.0:9190 takes connections from
            everywhere.
    """
    if (tracker is None) == (tracker_only is None):
        raise UsageError(
            "give either --tracker HOST:PORT and --key KEY, to measure, or --tracker-only HOST:PORT, to be the tracker"
        )
    if tracker and not key:
        raise UsageError("--key KEY is missing: what tuning runs ask the tracker for, as gfx1100")
    from mlc_amd.compiler.tuning import rpc_server  # imports TVM

    if tracker_only:
        rpc_server.track(rpc_server.address(tracker_only), display.message)
    elif tracker and key:
        rpc_server.serve(rpc_server.address(tracker), key, device, host, display.message)
