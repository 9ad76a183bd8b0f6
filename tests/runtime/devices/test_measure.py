"""Measuring: candidates and their inputs, comparison, timing on a simulated clock."""

import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from act_layouts import in_lanes
from candidates import ADD, STATE, made

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure import candidate, compare, inputs, timing
from mlc_amd.runtime.measure.timing import Bench
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.tools.reference.experts import order


def test_gpus_are_measured_without_tvm():
    names = ", ".join(
        f"mlc_amd.runtime.measure.{name}" for name in ("program", "measurer", "run_kit", "vulkan", "hip", "compare")
    )
    check = (
        f"import sys, {names}; print([m for m in sys.modules if m.split('.')[0] in ('tvm', 'tvm_ffi') or "
        f"m.startswith('mlc_amd.c')])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout == "[]\n"


# ---- candidates and inputs


def test_candidates_are_read_as_they_were_written(tmp_path):
    one = made(tmp_path / "one")
    again = candidate.read(tmp_path / "one")
    assert again.params == one.params and again.group == one.group and again.params[2].nbytes == 1024
    assert made(tmp_path / "other", arch="else").group != one.group
    private = [*ADD, {"name": "Parts", "shape": [9], "dtype": "float32", "role": "work"}]
    assert made(tmp_path / "larger", params=private).group == one.group  # plans decide on these
    with pytest.raises(UserError, match="holds no candidate"):
        candidate.read(tmp_path)
    (tmp_path / "candidate.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="another version"):
        candidate.read(tmp_path)


def test_figures():
    assert candidate.figures({"bytes": 2e9, "flops": 4e12}, 1e-3) == {"us": 1000.0, "gbps": 2000.0, "tflops": 4000.0}


PLANES = [
    ("W0_Q4", (64, 8, 4), "uint32", ["bits"]), ("W0_D", (64, 8), "float16", ["signs", 0.01]), ("W0_M", (64, 8),
    "float16", ["signs", 0.02]),
    ("W0_S", (64, 16), "int8", ["integers", -32, 64]), ("W1_W", (64, 100), "uint16", ["normal", 0.1]),
]  # fmt: skip


def test_inputs_are_the_same_everywhere_and_sane(tmp_path):
    params = [{"name": n, "shape": s, "dtype": t, "role": "weight", "draw": d} for n, s, t, d in PLANES]
    params += [{"name": "Kc", "shape": [2, 512, 64], "dtype": "float16", "role": "cache"}]
    params += [{"name": "tokens", "shape": [50], "dtype": "int32", "role": "input", "vocab": 9}]
    params += [{"name": "CS", "shape": [10, 8], "dtype": "float32", "role": "weight"}]
    one = made(tmp_path, params=params)
    arrays, again = (inputs.fill(one, STATE) for _ in range(2))
    for p in one.params:
        assert arrays[p.name].shape == p.shape and arrays[p.name].tobytes() == again[p.name].tobytes()
    d, m = arrays["W0_D"].astype(np.float32), arrays["W0_M"].astype(np.float32)
    np.testing.assert_allclose(m, 2 * d, rtol=2e-3)  # minimums go with their scales
    assert np.abs(d).min() > 0.005 and np.abs(d).max() < 0.02
    assert arrays["W0_S"].min() == -32 and arrays["W0_S"].max() == 31
    assert 0.9 < arrays["Kc"].astype(np.float32).std() < 1.1
    assert set(arrays["tokens"]) <= set(range(9))
    np.testing.assert_allclose(arrays["CS"][3, 2:4], [np.cos(0.3), np.sin(0.3)], rtol=1e-5)


def test_no_row_writes_what_another_reads(tmp_path):
    """Single rows share the pages before their own, also where there are more rows than pages; the shapes of caches are
    the same in every state."""
    rows, blocks, page = 40, 16, 64
    states = [[0, 1, 1, 0], [37, 37, 37, 0], [512, rows, rows, 0], [blocks * page - 1, rows, 30, 0]]
    params = [{"name": "rows", "shape": [rows, 2], "dtype": "int32", "role": "rows"}]
    params += [{"name": "pages", "shape": [64, blocks], "dtype": "int32", "role": "pages"}]
    params += [{"name": "Kc", "shape": [blocks, 2, page, 16], "dtype": "float16", "role": "cache"}]
    one = made(tmp_path, params=params, op="rope_attention", states=states)
    for state in states:
        arrays, single = inputs.fill(one, state), state[2]
        assert arrays["Kc"].shape == (blocks + rows, 2, page, 16)
        positions, slots = arrays["rows"][:single].T
        written = arrays["pages"][slots, positions // page]
        for row, position in enumerate(positions):
            read = arrays["pages"][slots[row], : position // page + 1]
            others = set(np.delete(written, row).tolist())
            assert not others & set(read.tolist()) and read.max() < len(arrays["Kc"])


@pytest.mark.parametrize("m", [1, 37])
def test_rows_are_routed_to_experts(m):
    of = Experts(12, 3, 1 if m == 1 else 8)
    found = inputs.routing_tables(asdict(of) | {"m": m, "tiles": of.tiles(m)})
    ids = found["Ids"].reshape(m, of.used)
    assert ids.shape == (m, of.used) and all(len(set(row)) == of.used for row in ids)
    if m == 1:
        assert found["Groups"] is found["Ids"]
        return
    slots, pairs, *groups = order(ids, of.count, of.tile, of.tiles(m))
    np.testing.assert_array_equal(found["Slots"].reshape(m, -1), slots)
    np.testing.assert_array_equal(found["Pairs"], pairs)
    np.testing.assert_array_equal(found["Groups"], np.concatenate(groups))
    assert found["Groups"].shape == (of.groups(m),)


def test_int8_activations_carry_their_own_sums():
    a, s = inputs.quantized((3, 4, 32), (3, 4, 4))
    d, q = s[..., 0], a.astype(np.int32)
    for field, part in ((1, q), (2, q[..., :16]), (3, q[..., 16:])):
        np.testing.assert_allclose(s[..., field], d * part.sum(-1), rtol=1e-6)
    assert np.abs(a).max() == 127
    a, s = inputs.quantized((2, 4, 16, 32), (2, 4, 8, 16))
    q = a.astype(np.int32).sum(-1)
    np.testing.assert_allclose(s[:, :, 1], s[:, :, 0] * q, rtol=1e-6)
    assert (np.ascontiguousarray(s[:, :, 2]).view(np.int32) == -q).all()


# ---- comparison


def outputs(*params):
    return [{"name": n, "shape": s, "dtype": t, "role": r} | f for n, s, t, r, f in params]


def test_comparison_of_floats(tmp_path):
    one = made(
        tmp_path,
        params=outputs(("Y0", [4, 48], "float32", "output", {"columns": 40}), ("Kc", [8, 8], "float16", "cache", {})),
    )
    rng = np.random.default_rng(0)
    expected = {
        "Y0": rng.standard_normal((4, 48)).astype(np.float32),
        "Kc": rng.standard_normal((8, 8)).astype(np.float16),
    }

    def wrong(name, where, value):
        found = {key: array.copy() for key, array in expected.items()}
        found[name][where] = value
        return compare.differences(one, STATE, expected, found)

    assert compare.differences(one, STATE, expected, expected) == (0.0, [])
    share, why = wrong("Y0", (1, 1), expected["Y0"][1, 1] + 1e-4)
    assert 0 < share < 1 and not why  # the order of additions
    assert wrong("Y0", (0, 41), 9.0) == (0.0, [])  # padding
    assert wrong("Y0", (3, 1), 9.0) == (0.0, [])  # beyond the three live tokens
    for name, where, value in (("Y0", (2, 3), 9.0), ("Y0", (2, 3), np.nan), ("Kc", (7, 7), 5.0)):
        share, why = wrong(name, where, value)
        assert share > 1 and name in why[0]
    found = expected | {"Y0": np.full((4, 48), inputs.SIGNATURE * 0x01010101, np.uint32).view(np.float32)}
    assert "not written" in compare.differences(one, STATE, found, found)[1][0]  # agreeing to do nothing does not count


@pytest.mark.parametrize("k", [256, 192])
def test_comparison_of_activations_in_the_order_of_lanes(tmp_path, k):
    """Three live rows of a tile of eight: what the others hold does not count."""
    one = made(tmp_path, params=outputs(("H", [1, 2, 1024], "float16", "output", {})))
    unwritten = np.full((8, k), inputs.SIGNATURE * 0x0101, np.uint16).view(np.float16)
    x = np.concatenate([np.random.default_rng(0).standard_normal((3, k)).astype(np.float16), unwritten[3:]])

    def lanes(x):
        padded = np.concatenate([x, unwritten[:, : -k % 128]], axis=1)
        return {"H": in_lanes(padded, 4)}

    expected = lanes(x)
    assert compare.differences(one, STATE, expected, expected) == (0.0, [])
    assert compare.differences(one, STATE, expected, lanes(np.vstack([x[:3], x[:3], x[:2]]))) == (0.0, [])
    for rows in (x[:2], x[:0]):
        found = lanes(np.vstack([rows, unwritten[len(rows) :]]))
        assert "not written" in compare.differences(one, STATE, expected, found)[1][0]
    x[2, 5] += 1
    assert "H differs" in compare.differences(one, STATE, expected, lanes(x))[1][0]


@pytest.mark.parametrize("tiles", [False, True])
def test_comparison_of_int8_activations(tmp_path, tiles):
    shapes = ([1, 8, 16, 32], [1, 8, 8, 16]) if tiles else ([4, 8, 32], [4, 8, 4])
    one = made(
        tmp_path, params=outputs(("A", shapes[0], "int8", "output", {}), ("S", shapes[1], "float32", "output", {}))
    )
    a, s = inputs.quantized(*map(tuple, shapes))
    expected = {"A": a, "S": s}
    place, scale = ((0, 0, 0, 5), (0, 0, 0, 0)) if tiles else ((0, 0, 5), (0, 0, 0))
    assert compare.differences(one, STATE, expected, expected) == (0.0, [])

    def changed(array, where, by):
        new = array.copy()
        new[where] += by
        return new

    def why(**arrays):
        return compare.differences(one, STATE, expected, expected | arrays)[1][0]

    step = 2 if a[place] < 100 else -2
    assert "2 steps apart" in why(A=changed(a, place, step))
    assert "scales" in why(S=changed(s, scale, 0.01))
    assert "a step apart" in why(A=np.where(a < 0, a + 1, a - 1).astype(np.int8))
    second = (*scale[:2], 1, *scale[3:]) if tiles else (*scale[:2], 1)
    assert "sums" in why(S=changed(s, second, 1.0))


# ---- timing


class Clock:
    """A device whose time we make: `speed(call number)` slows everything down, kernels take what their `code` says."""

    name, facts, cache, target, noise = "clock", {}, 1 << 14, 1e-3, 0.0

    def __init__(self, speed=lambda runs: 1.0):
        self.speed, self.runs, self.bound, self.kept, self.sequence = speed, 0, [], {}, []

    def open(self, sizes):
        self.sizes = sizes

    def put(self, key, array):
        self.kept[key] = array.copy()

    def load(self, candidates):
        return [
            float(c.code.read_bytes()) if c.code.read_bytes() != b"bad" else ValueError("no such kernel")
            for c in candidates
        ]

    def bind(self, handle, candidate, keys):
        return handle, keys

    def run(self, calls):
        self.runs += 1
        self.sequence += [(seconds, keys) for seconds, keys in calls]
        return sum(seconds for seconds, _ in calls) * self.speed(self.runs)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(timing, "BUSY", 0.0)


def timed(tmp_path, clock, codes):
    results, doing = {}, []
    group = Bench(clock, [made(tmp_path / str(i), str(code).encode()) for i, code in enumerate(codes)])
    group.measure(doing.append, lambda i, result: results.__setitem__(i, result))
    return group, results, doing


def test_weights_rotate_over_more_than_the_cache_and_activations_stay(tmp_path):
    clock = Clock()
    group, results, _ = timed(tmp_path, clock, [1e-4])
    assert group.copies == (1 << 14) // 1024
    keys = [keys for _, keys in clock.sequence]
    assert [k[2][0] for k in keys[:40]] == [i % 16 for i in range(40)], (
        "each call takes the next copy, also in the next repetition"
    )
    assert {k[1] for k in keys} == {("shared", "X")}
    assert all(clock.kept[copy, "G"].tobytes() == clock.kept[0, "G"].tobytes() for copy in range(16))
    assert (
        results[0]["seconds"] == pytest.approx(1e-4)
        and results[0]["spread"] == pytest.approx(0)
        and len(results[0]["runs"]) == 7
    )


def test_medians_outliers_and_failures(tmp_path):
    clock = Clock(lambda runs: 3.0 if runs % 5 == 0 else 1.0)  # one of five repetitions is noisy
    group, results, _ = timed(tmp_path, clock, [1e-4, 2e-4, "bad"])
    assert results[0]["seconds"] == pytest.approx(1e-4) and results[1]["seconds"] == pytest.approx(2e-4)
    assert results[1]["outliers"] >= 1 and len(results[1]["runs"]) > timing.REPEATS  # noticed, and repeated
    assert group.failures == {2: "no such kernel"}


def test_repetitions_with_noise_do_not_count(tmp_path):
    class Shared(Clock):
        def run(self, calls):
            self.noise = 0.5 if self.runs % 3 else 0.0
            return super().run(calls) * (1 + self.noise)

    _, results, _ = timed(tmp_path, Shared(), [1e-4])
    assert (
        results[0]["seconds"] == pytest.approx(1e-4)
        and results[0]["noise"] == 0
        and results[0]["spread"] == pytest.approx(0)
    )


def test_candidates_timed_while_the_clocks_fell_are_timed_again(tmp_path):
    speed = {"now": 1.0}
    clock = Clock(lambda runs: speed["now"])
    group = Bench(clock, [made(tmp_path / str(i), b"1e-4") for i in range(4)])
    results, history = {}, []

    def doing(i):
        history.append(i)
        speed["now"] = 1.5 if 2 <= len(history) <= 5 else 1.0  # until the reference shows it

    group.measure(doing, lambda i, result: results.__setitem__(i, result))
    assert history == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert all(result["seconds"] == pytest.approx(1e-4) and result["drift"] == 0 for result in results.values())


def test_drift_that_stays_is_marked(tmp_path):
    steps = iter(np.linspace(1, 40, 400))
    _, results, _ = timed(tmp_path, Clock(lambda runs: next(steps)), [1e-4, 1e-4])
    assert results[1]["drift"] > timing.DRIFT


def test_slow_candidates_get_fewer_repetitions(tmp_path):
    _, results, _ = timed(tmp_path, Clock(), [1e-5, 1e-3])
    assert len(results[1]["runs"]) == timing.FEWER
