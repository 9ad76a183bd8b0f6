"""The benchmark: which tests it runs, what it counts as read, how it reports, and that the machine's bandwidth is a
sane number."""

import csv
import io
import json

import pytest

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.cpu import CpuDevice
from mlc_amd.runtime.engine.batch import Batch
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.tools import cli
from mlc_amd.tools.commands import bench
from mlc_amd.tools.commands.bench import Test as Case
from mlc_amd.tools.measure import bandwidth, bench_formats, bounds, kernel_table

SPEC = "tiny:q4_0"
TINY = ("--synthetic", SPEC, "--ctx", "64", "--target", "cpu")


def shapes_of(artifact: Artifact) -> dict[str, int]:
    """Sizes of a model of equal layers."""
    model = artifact.manifest["model"]
    layer = model["layers"][0]
    sizes = layer["mixer"] | {"ffn": layer["feed_forward"]["size"], "layers": len(model["layers"])}
    return model | sizes


@pytest.fixture(scope="module", autouse=True)
def folder(compiled):
    """The model, compiled, in the user's cache."""
    path = compiled(SPEC, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path.parents[2]))
        yield path


def test_tests_come_in_llama_benchs_order_and_names():
    tests = bench.plan_tests((512, 0), (128,), (0, 4096))
    assert [t.name for t in tests] == ["pp512", "tg128", "pp512 @ d4096", "tg128 @ d4096"]


def test_one_line_of_json_per_test_with_llama_benchs_names(capsys, folder):
    assert cli.main(["bench", *TINY, "-p", "16", "-n", "4", "-d", "0,32", "-r", "3", "-o", "jsonl"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["test"] for r in results] == ["pp16", "tg4", "pp16 @ d32", "tg4 @ d32"]
    for result in results:
        assert len(result["samples_ts"]) == 3 and result["avg_ts"] == pytest.approx(sum(result["samples_ts"]) / 3)
        tokens = result["n_prompt"] + result["n_gen"]
        assert result["samples_ts"][0] == pytest.approx(tokens / result["samples_ns"][0] * 1e9, rel=1e-3)
        assert result["model_type"] == "Synthetic tiny Q4_0" and result["backends"] == "CPU"
    assert results[0]["read_gbps"] is None
    assert results[1]["read_share"] == pytest.approx(results[1]["read_gbps"] / results[1]["machine_gbps"])
    assert len(list(folder.parent.glob("*/manifest.json"))) == 1


def test_markdown_csv_and_json_hold_the_same_numbers_of_rows(capsys):
    command = ["bench", *TINY, "-p", "8", "-n", "2", "-r", "1", "-o"]
    assert cli.main([*command, "md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert header[:7] == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert set(lines[1]) <= set("|-: ") and len({len(line) for line in lines}) == 1 and len(lines) == 4
    assert cli.main([*command, "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in rows] == ["pp8", "tg2"] and float(rows[1]["avg_ts"]) > 0
    assert cli.main([*command, "json"]) == 0
    assert [entry["test"] for entry in json.loads(capsys.readouterr().out)] == ["pp8", "tg2"]


def test_too_small_a_context_is_an_error(capsys, folder):
    for depth, advice in (("1000", "compile it with --ctx 1512"), ("100000", "was made for 2048 at most")):
        assert cli.main(["bench", str(folder), "-d", depth]) == 1
        assert advice in capsys.readouterr().err


def test_decoding_reads_all_matrices_but_the_embedding_and_the_cache_so_far(folder):
    artifact = Artifact.open(folder)
    model = shapes_of(artifact)
    per_position = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * 2
    assert kernel_table.decode_bytes(artifact, 9) - kernel_table.decode_bytes(artifact, 4) == 5 * per_position
    hidden, ffn, heads = model["hidden"], model["ffn"], model["head_dim"] * (model["heads"] + 2 * model["kv_heads"])
    q4_0 = 18 / 32  # bytes a weight
    matrices = (
        model["layers"] * (hidden * heads + model["heads"] * model["head_dim"] * hidden + 3 * hidden * ffn)
        + model["vocab"] * hidden
    )
    norms = (2 * model["layers"] + 1) * hidden * 4
    assert kernel_table.decode_bytes(artifact, 0) == pytest.approx(matrices * q4_0 + norms + per_position, rel=0.01)


def test_each_repetition_starts_at_the_same_depth(folder, monkeypatch):
    engine = Engine.load(folder)
    positions = []
    advance = engine.advance
    monkeypatch.setattr(engine, "advance", lambda ids: (positions.append((engine.position, len(ids))), advance(ids))[1])
    decoded, decode = [], Batch.decode

    def recorded(batch, ids, count):
        decoded.append(([len(sequence.tokens) for sequence in batch._sequences], len(ids), count))
        decode(batch, ids, count)

    monkeypatch.setattr(Batch, "decode", recorded)
    assert len(bench.measure(engine, Case(0, 2, 7), 2)[0]) == 2
    assert decoded == [([7], 1, 2)] * 3 and not positions
    assert len(bench.measure(engine, Case(5, 0, 7), 1)[0]) == 1
    assert positions == [(0, 7), (7, 5), (7, 5)]
    assert engine.position == 12


def test_a_step_is_timed_kernel_by_kernel(capsys, folder):
    assert (
        cli.main(["bench", str(folder), "-p", "40", "-n", "2", "-d", "16", "-r", "1", "--per-kernel", "-o", "json"])
        == 0
    )
    prefill, decode = (result["per_kernel"] for result in json.loads(capsys.readouterr().out))
    functions = Artifact.open(folder).manifest["functions"]
    assert (prefill["function"], prefill["tokens"], decode["function"], decode["tokens"]) == (
        "prefill_64",
        40,
        "decode",
        1,
    )
    for found in (prefill, decode):
        kernels = found["kernels"]
        assert found["depth"] == 16
        assert sum(k["calls"] for k in kernels) == found["launches"] == len(functions[found["function"]]["launches"])
        assert sum(k["share"] for k in kernels) == pytest.approx(1)
        assert sum(k["us"] * k["calls"] for k in kernels) == pytest.approx(found["kernels_us"])
        assert all(k["us"] > 0 for k in kernels) and found["gaps_us"] >= 0
        counted = ("linear", "gate_up", "attention")
        assert all((k["tops"] is not None) == k["kernel"].startswith(counted) for k in kernels)
        assert all(k["gbps"] is None for k in kernels if k["kernel"].startswith("embed"))


def test_operations_are_two_per_weight_and_token(folder):
    artifact = Artifact.open(folder)
    model = shapes_of(artifact)
    hidden, heads = model["hidden"], model["head_dim"] * (model["heads"] + 2 * model["kv_heads"])
    layer = hidden * heads + model["heads"] * model["head_dim"] * hidden + 3 * hidden * model["ffn"]
    for name, rows in (("decode", 1), ("prefill_64", 64), ("score_64", 64)):
        function = artifact.manifest["functions"][name]
        kernels = [entry for entry in artifact.manifest["kernels"] if name in entry["calls"]]
        total = sum(entry["calls"][name] * entry["operations"]["call"] for entry in kernels)
        assert total == 2 * (rows * model["layers"] * layer + function["logits"] * model["vocab"] * hidden)
        scores = model["layers"] * model["heads"] * model["head_dim"] * 4
        asked = sum(entry["calls"][name] * bounds.operations(entry, rows, 0) for entry in kernels)
        assert asked - total == scores * sum(range(1, rows + 1))


def test_the_manifest_says_what_each_argument_is(folder):
    """What is a weight or a part of the cache by its place is one by its role, and the other way round."""
    manifest = Artifact.open(folder).manifest
    kernels = {entry["name"]: entry for entry in manifest["kernels"]}
    steps = {"state": "state", "answers": "state", "rows": "rows", "pages.0": "pages"}
    for function in manifest["functions"].values():
        for launch in function["launches"]:
            for param, (place, name, *_) in zip(kernels[launch["kernel"]]["params"], launch["args"], strict=True):
                wanted = {"weight": "weight", "kv": "cache"}.get(place, steps.get(name) if place == "io" else None)
                role = param["role"]
                assert role == wanted if wanted else role in ("input", "output", "work")


def test_timing_leaves_the_cache_as_it_is(folder):
    engine = Engine.load(folder)
    ids = [3, 1, 4, 1, 5]
    engine.prefill(ids)
    expected = engine.decode(9)
    engine.truncate(len(ids))
    engine.time([7] * 20)
    assert engine.tokens == ids
    assert (engine.decode(9) == expected).all()


def test_the_host_profile_accounts_for_all_time(capsys, folder):
    assert cli.main(["bench", str(folder), "-p", "0", "-n", "8", "-r", "1", "--profile-host", "-o", "jsonl"]) == 0
    result = json.loads(capsys.readouterr().out)
    parts = result["host_profile"]
    assert 0 < result["host_us"] < result["avg_ns"] / 8 / 1000
    assert all(us >= 0 for us in parts.values()) and parts["waiting"] > 0 and parts["sampling"] > 0
    own = [us for name, us in parts.items() if name not in ("total", "waiting")]
    assert sum(own) == pytest.approx(parts["total"])


def test_tables_follow_the_results(capsys, folder):
    command = ["bench", str(folder), "-p", "8", "-n", "2", "-r", "1", "--per-kernel", "--profile-host"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    results, *tables = shown.split("\n\n")
    assert results.count("\n") == 3
    assert [table.split("\n")[0] for table in tables] == ["prefill_64, 8 tokens @ d0", "decode, 1 tokens @ d0", "tg2"]
    assert "gaps between them" in tables[0] and "(waiting for the device)" in tables[2]


def test_experts_in_host_memory_have_a_column_where_they_are_asked_for():
    head, write, _ = bench_formats.writer("md", bench_formats.OF_OTHERS)
    result = dict.fromkeys(("model_type", "backends", "n_threads", "test", "machine_how", "peak_product"), "x")
    result |= dict.fromkeys(("read_share", "peak_share", "machine_gbps", "peak_gbps", "n_gen"), 0)
    result |= dict.fromkeys(("power_w", "joules_per_token"))
    result |= {"n_cpu_moe": 8, "model_size": 1 << 30, "avg_ts": 1.0, "stddev_ts": 0.0, "model_n_params": 1e9}
    shown = dict(zip(cells(head.splitlines()[0]), cells(write(result)), strict=True))
    assert (shown["n_cpu_moe"], shown["t/s"], shown["host us"]) == ("8", "1.00 ± 0.00", "")
    assert "n_cpu_moe" not in bench_formats.writer("md", ("n_cpu_moe",))[0]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_a_device_that_cannot_time_kernels_is_an_error(capsys, folder, monkeypatch):
    monkeypatch.delattr(CpuDevice, "time")
    assert cli.main(["bench", str(folder), "-p", "8", "-n", "2", "--per-kernel"]) == 1
    assert "--per-kernel" in capsys.readouterr().err


def test_read_bandwidth_is_positive_and_plausible():
    assert 1e8 < bandwidth.measure(1) < 1e13
    assert bandwidth.last_level_cache() >= 1 << 18
