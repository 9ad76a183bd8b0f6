"""Steps that start while another one is in progress, for tests on the CPU."""

from collections import deque

from mlc_amd.runtime.artifact.io_names import OUTPUTS
from mlc_amd.runtime.engine.engine import Engine


def computes_ahead(engine: Engine, monkeypatch) -> list[str]:
    """Makes a CPU compute each step when it starts, also while the results of the one before are not read: in the order
    of a GPU. Returns the growing list of the functions that started ahead."""
    device, outputs, started_ahead = engine.device, deque(), []
    read, rows = device.read, {name: of["logits"] for name, of in device.artifact.manifest["functions"].items()}

    def compute_now(name):
        device.run(name)
        outputs.append({of: read(of, rows[name]).copy() for of in OUTPUTS})

    def start(name, meanwhile=None):
        outputs.clear()  # of runs without a wait
        if meanwhile:
            meanwhile()
        compute_now(name)

    def start_ahead(name, late=False):
        assert len(outputs) == 1
        sampled = outputs[-1]["sampled"]
        device.write("tokens", sampled)
        started_ahead.append(name)
        if not late:
            compute_now(name)

    def wait():
        device.found = outputs.popleft()

    monkeypatch.setattr(device, "can_start_ahead", lambda name, late=False: True)
    monkeypatch.setattr(device, "complete_inputs", compute_now, raising=False)
    monkeypatch.setattr(device, "start", start, raising=False)
    monkeypatch.setattr(device, "start_ahead", start_ahead, raising=False)
    monkeypatch.setattr(device, "wait", wait, raising=False)
    monkeypatch.setattr(device, "read", lambda name, n: device.found[name][:n] if device.found else read(name, n))
    monkeypatch.setattr(device, "found", None, raising=False)
    run = device.run

    def run_alone(*arguments):
        device.found = None
        run(*arguments)

    monkeypatch.setattr(device, "run", run_alone)
    return started_ahead


def assert_nothing_is_held(engine: Engine) -> None:
    for pool in engine.cache.pools.values():
        assert pool.available == pool.pages
