"""The benchmark on a Vulkan device (Mesa's CPU driver will do): measured and known bandwidth, times of kernels, what
the host does."""

import json
import time

import pytest
from vulkan_harness import gpu

from mlc_amd.runtime import gpus
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.tools import cli
from mlc_amd.tools.commands import bench
from mlc_amd.tools.measure import bandwidth, kernel_table

PROFILE = "lavapipe"


@pytest.fixture(scope="module")
def artifact(lavapipe_model):
    gpu()
    return lavapipe_model


@pytest.fixture
def engine(artifact):
    engine = Engine.load(artifact)
    yield engine
    engine.device.close()


@pytest.fixture
def known(artifact, monkeypatch):
    """The artifact, on a GPU whose bandwidth is in the table: 25 GB/s."""
    monkeypatch.setitem(gpus.BANDWIDTH, "llvmpipe", 25)
    monkeypatch.setattr(gpus, "VENDORS", {"llvmpipe"})
    return artifact


def test_decoding_is_told_as_shares_of_the_copy_and_of_the_peak(artifact, capsys, request):
    command = ["-p", "0", "-n", "2", "-r", "1", "-o"]
    assert profiles.resolve(PROFILE).bandwidth == 0
    assert cli.main(["bench", str(artifact), *command, "jsonl"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["backends"], result["arch"], result["machine_how"]) == ("VULKAN", PROFILE, "copy")
    assert 0 < result["machine_gbps"] < 1e4
    assert result["read_share"] == pytest.approx(result["read_gbps"] / result["machine_gbps"])
    assert result["peak_gbps"] is None and result["peak_share"] is None
    assert 0 < result["host_us"] < result["avg_ns"] / 2 / 1000

    assert cli.main(["bench", str(artifact), *command, "md"]) == 0
    assert "of measured" in (shown := capsys.readouterr().out) and "of table" not in shown

    assert cli.main(["bench", str(request.getfixturevalue("known")), *command, "jsonl"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["peak_gbps"], result["peak_product"]) == (25, "llvmpipe")
    assert result["peak_share"] == pytest.approx(result["read_gbps"] / 25)


@pytest.mark.full
def test_tables_name_the_peak(known, capsys):
    assert cli.main(["bench", str(known), "-p", "0", "-n", "2", "-r", "1", "-o", "md"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split("|")[-3].endswith("of 25 (llvmpipe) ")


@pytest.mark.full
def test_kernel_times_add_up_and_shares_are_of_the_peak(known, capsys):
    assert (
        cli.main(["bench", str(known), "-p", "20", "-n", "1", "-d", "3", "-r", "1", "--per-kernel", "-o", "json"]) == 0
    )
    prefill, decode = (result["per_kernel"] for result in json.loads(capsys.readouterr().out))
    assert (prefill["tokens"], decode["tokens"], decode["function"], decode["depth"]) == (20, 1, "decode", 3)
    manifest = json.loads((known / "manifest.json").read_text())
    for found in (prefill, decode):
        calls = manifest["functions"][found["function"]]["launches"]
        steps = sum(len(manifest["launches"][PROFILE][call["kernel"]]["steps"]) for call in calls)
        assert found["launches"] == steps and sum(k["calls"] for k in found["kernels"]) == len(calls)
        assert sum(k["us"] * k["calls"] for k in found["kernels"]) == pytest.approx(found["kernels_us"])
        assert found["limits"] == {"bandwidth": 25e9, "rates": {}}
        for k in found["kernels"]:
            if k["gbps"]:
                assert k["bound_share"] == pytest.approx(k["gbps"] / 25) == pytest.approx(k["bound_us"] / k["us"])
            assert k["bound_by"] == ("memory" if k["gbps"] else None)
        assert any(k["tops"] for k in found["kernels"])


@pytest.mark.full
def test_the_table_of_kernels_names_the_bandwidth(known, capsys):
    assert cli.main(["bench", str(known), "-p", "0", "-n", "1", "-r", "1", "--per-kernel"]) == 0
    assert "bounds: at 25 GB/s (llvmpipe)" in capsys.readouterr().out


def test_a_kernel_of_several_steps_is_one_call(engine):
    """The steps of one call are timed one by one and count together."""
    timed = engine.time([1])
    (name, tokens, steps), wanted = timed, engine.artifact.manifest["functions"]["decode"]["launches"]
    assert (name, tokens) == ("decode", 1) and engine.position == 0
    assert [kernel for kernel, _, _ in steps] == [
        call["kernel"]
        for call in wanted
        for _ in engine.artifact.manifest["launches"][PROFILE][call["kernel"]]["steps"]
    ]
    assert all(seconds > 0 and gap >= 0 for _, seconds, gap in steps)


def test_only_keys_and_values_count_as_cache(engine):
    """GPUs keep what decode attention's splits join through beside the cache."""
    artifact, layers = engine.artifact, [layer["mixer"] for layer in engine.config["layers"]]
    assert any(entry["name"].startswith("attention.") for entry in artifact.manifest["kv"])
    per_position = sum(2 * layer["kv_heads"] * layer["head_dim"] * 2 for layer in layers)
    assert kernel_table.decode_bytes(artifact, 30) - kernel_table.decode_bytes(artifact, 10) == pytest.approx(
        20 * per_position
    )


def test_a_gpu_is_kept_busy_first_and_the_position_stays(engine):
    engine.prefill([1, 2, 3])
    start, waited = time.perf_counter(), engine.device.waited
    bench.warm(engine)
    assert time.perf_counter() - start >= 0.25 and engine.device.waited > waited
    assert engine.tokens == [1, 2, 3]


def test_without_timestamps_nothing_is_made_up(engine, monkeypatch):
    monkeypatch.setattr(engine.device.context, "clock_bits", 0)
    assert bandwidth.of_device(engine.device) is None
    with pytest.raises(UserError, match="timestamps"):
        engine.time([1])
