"""The benchmark: which tests it runs, what it counts as read, how it reports, and that the machine's bandwidth is a sane number."""

import csv
import io
import json

import pytest

from mlc_amd.runtime.artifact import Artifact
from mlc_amd.runtime.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import bandwidth, bench, cli
from mlc_amd.tools.bench import Test as Case

TINY = ("--synthetic", "tiny:q4_0")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Compiled models go where nobody keeps theirs."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path / "mlc-amd"


def test_tests_come_in_llama_benchs_order_and_names():
    tests = bench.plan_tests((512, 0), (128,), (0, 4096))
    assert [t.name for t in tests] == ["pp512", "tg128", "pp512 @ d4096", "tg128 @ d4096"]
    with pytest.raises(UserError, match="negative"):
        bench.plan_tests((-1,), (1,), (0,))


def test_one_line_of_json_per_test_with_llama_benchs_names(capsys, cache):
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
    assert len(list(cache.iterdir())) == 1


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


def test_too_small_a_context_is_an_error(capsys, cache):
    folder = next(cache.iterdir())
    assert cli.main(["bench", str(folder), "-d", "100000"]) == 1
    assert "larger --ctx" in capsys.readouterr().err


def test_decoding_reads_all_matrices_but_the_embedding_and_the_cache_so_far(cache):
    artifact = Artifact.open(next(cache.iterdir()))
    model = artifact.manifest["model"]
    per_position = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * 2
    assert bench.decode_bytes(artifact, 9) - bench.decode_bytes(artifact, 4) == 5 * per_position
    hidden, ffn, heads = model["hidden"], model["ffn"], model["head_dim"] * (model["heads"] + 2 * model["kv_heads"])
    q4_0 = 18 / 32  # bytes a weight
    matrices = model["layers"] * (hidden * heads + model["heads"] * model["head_dim"] * hidden + 3 * hidden * ffn) + model["vocab"] * hidden
    norms = (2 * model["layers"] + 1) * hidden * 4
    assert bench.decode_bytes(artifact, 0) == pytest.approx(matrices * q4_0 + norms + per_position, rel=0.01)


def test_each_repetition_starts_at_the_same_depth(cache, monkeypatch):
    engine = Engine.load(next(cache.iterdir()))
    positions = []
    decode = engine.decode
    monkeypatch.setattr(engine, "decode", lambda token: (positions.append(engine.position), decode(token))[1])
    assert len(bench.measure(engine, Case(0, 2, 7), 2)) == 2
    assert positions == [7, 8] * 3
    assert len(bench.measure(engine, Case(5, 0, 7), 1)) == 1
    assert engine.position == 12


def test_read_bandwidth_is_positive_and_plausible():
    assert 1e8 < bandwidth.measure(1) < 1e13
    assert bandwidth.last_level_cache() >= 1 << 18
