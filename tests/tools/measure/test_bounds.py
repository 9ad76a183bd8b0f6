"""Lower bounds of kernels' calls: costs by a manifest, at the limits of a GPU; the shares that a device reaches."""

from types import SimpleNamespace

import pytest
from hip_model import HEAD, KERNELS, WIDTH, artifact_in

from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.gpus import Limits, limits_of
from mlc_amd.tools.measure import bounds, kernel_table
from tests.dev.hip_recorder import EVENT_MS, LAUNCH_MS, Recorder

WINDOWED = {"bytes": {"call": 7, "token": 2, "key": 3}, "operations": {"call": 1, "score": 10}, "keys": 4}


def test_a_window_bounds_what_is_read_and_computed():
    assert [bounds.traffic(WINDOWED, 2, depth) for depth in (0, 3, 100)] == [11, 20, 23]
    assert [bounds.operations(WINDOWED, 2, depth) for depth in (0, 3, 100)] == [31, 81, 81]


def test_sequences_read_their_own_keys():
    """Two single rows and a chunk of two: three sequences after two tokens each; rows see 3, 3, 3 and 4 keys."""
    assert bounds.traffic(WINDOWED, 4, 2, single=2) == 7 + 2 * 4 + 3 * 3 * 2
    assert bounds.operations(WINDOWED, 4, 2, single=2) == 1 + 10 * (3 + 3 + 3 + 4)
    assert bounds.traffic(WINDOWED, 2, 2, single=2) == 7 + 2 * 2 + 3 * 2 * 2


def test_the_larger_of_both_times_counts():
    limits = Limits(100e9, {"fma": 1e12, "matrix16": 8e12})
    assert bounds.bound(1e6, 1e6, "fma", limits) == (pytest.approx(1e-5), "memory")
    assert bounds.bound(1e6, 1e8, "fma", limits) == (pytest.approx(1e-4), "fma")
    assert bounds.bound(1e6, 1e8, "matrix16", limits) == (pytest.approx(1.25e-5), "matrix16")
    assert bounds.bound(1e6, 1e8, None, limits) == (pytest.approx(1e-5), "memory")
    assert bounds.bound(0, 0, "fma", limits) is None and bounds.bound(1e6, 0, None, Limits(0.0, {})) is None


def test_the_fastest_unit_of_all_launches_counts():
    steps = [{"units": ["fma", "dot4"]}, {"units": ["fma", "matrix8"]}, {}]
    manifest = {"launches": {"gfx1100": {"k": {"steps": steps}}}}
    assert bounds.unit_of(manifest, "gfx1100", "k", limits_of("gfx942")) == "matrix8"
    assert bounds.unit_of(manifest, "gfx1100", "k", limits_of("gfx1030")) == "dot4"  # has no matrices
    assert bounds.unit_of({"launches": {}}, "znver4", "k", limits_of("znver4")) is None


@pytest.fixture
def engine(tmp_path):
    """engine(name) -> what `measure` takes of an Engine, on a stand-in for HIP whose clock is known."""
    opened = []

    def make(name: bytes) -> SimpleNamespace:
        artifact = artifact_in(tmp_path)("gfx1100")
        for entry in artifact.manifest["kernels"]:
            entry["calls"] = {"decode": 1}
        artifact.manifest["launches"]["gfx1100"]["last"]["steps"][0]["units"] = ["fma"]
        device = HipDevice(artifact, bindings=Recorder(KERNELS, gpus=({"name": name},)))
        opened.append(device)
        device.write("state", (1, 1))
        timed = lambda ids: ("decode", len(ids), device.time("decode"))  # noqa: E731
        return SimpleNamespace(device=device, artifact=artifact, position=20, time=timed)

    yield make
    for device in opened:
        device.close()


LAUNCH = (LAUNCH_MS + EVENT_MS) * 1e-3  # seconds


@pytest.mark.parametrize(
    ("name", "measured", "gbps"), [(b"Radeon", None, 960), (b"Radeon", 700e9, 700), (b"Radeon RX 7900 XT", 700e9, 800)]
)
def test_shares_are_bounds_over_times(engine, name, measured, gbps):
    """By the product's bandwidth, else the measured one, else the chip's."""
    made = engine(name)
    limits = bounds.limits_on(made.device, made.artifact.manifest, measured)
    found = kernel_table.measure(made, [1], limits)
    assert found["limits"]["rates"]["matrix16"] == pytest.approx(96 * 2.5e9 * 512)
    kernels = {row["kernel"]: row for row in found["kernels"]}
    for kernel, moved, seconds in (("last", HEAD.nbytes, LAUNCH), ("mix", HEAD.nbytes + 21 * 4 * WIDTH, 2 * LAUNCH)):
        row = kernels[kernel]
        assert row["us"] == pytest.approx(seconds * 1e6) and row["bound_by"] == "memory"
        assert row["bound_us"] == pytest.approx(moved / gbps / 1e3)
        assert row["bound_share"] == pytest.approx(moved / (gbps * 1e9) / seconds)


def test_a_share_of_arithmetic(engine):
    found = kernel_table.measure(engine(b"Radeon"), [1], Limits(960e9, {"fma": 1e9, "dot4": 1e12}))
    (row,) = (row for row in found["kernels"] if row["kernel"] == "last")
    assert (row["bound_by"], row["bound_us"]) == ("fma", pytest.approx(HEAD.size / 1e3))
    assert row["bound_share"] == pytest.approx(HEAD.size / 1e9 / LAUNCH)
    shown = kernel_table.text(found, "7900 XTX")
    assert f"{row['bound_share']:.0%}  fma" in shown and "bounds: at 960 GB/s (7900 XTX); TOPS: fma 0.0, dot4" in shown
