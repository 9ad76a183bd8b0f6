"""Products whose kernel adds up the results of several GPUs, too: in emulators, with the others' words in memory or
coming in any order, against the kernels of the product and of the exchange."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from samples import sample
from spirv_emulation import execute
from workloads import linear_op, operator

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.exchange_layout import CONTROL, DONE, EMPTY, FAILED, GROUPS, RANK, row
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.exchange.joint import can_join, joint
from mlc_amd.schedules.operators import AllReduce
from mlc_amd.tools.reference import operators
from mlc_amd.tools.reference.activations import read
from mlc_amd.tools.reference.case import Case as Reference
from tests.dev.gfxemu import emulate
from tests.schedules.gpu.test_gpu_gemv import TOLERANCE, activations, check_no_spills, weights

N, K = 96, 256


def linear(fmt: str, m: int):
    """(operator, exact result, arrays) of a linear with a bias."""
    kind = FORMATS[fmt].kind
    (x, acts), (w, planes) = activations(K, kind, m), weights(fmt, N, K, 1, "W0_")
    y = x @ w.T
    bias = (np.abs(y).max() * np.random.default_rng(1).standard_normal(N)).astype(np.float32)
    op = linear_op([(fmt, N)], K, m, "rows" if kind == "int8" else "", (True,))
    return op, y + bias, acts | planes | {"bias0": bias}


def experts(fmt: str, used: int):
    """The same of the down projections of a token's experts."""
    count, rng = 9, np.random.default_rng(1)
    (x, acts), (w, planes) = activations(K, "int8", used), weights(fmt, count * N, K, 1, "W_")
    ids, scales = rng.permutation(count)[:used], rng.random(used).astype(np.float32)
    y = sum(scale * (w.reshape(count, N, K)[i] @ row) for i, scale, row in zip(ids, scales, x, strict=True))
    args = {"fmt": fmt, "n": N, "k": K, "experts": count, "used": used, "tile": 1, "bias": False, "layout": "rows"}
    op = operator("expert_down", args | {"weighted": True, "residual": False})
    return op, y[None], acts | planes | {"Groups": ids[None].astype(np.int32), "Weights": scales[None]}


class Case:
    """A product with bias, or that of experts, and its sum over GPUs; what a rank finds in memory in round `number`."""

    def __init__(self, m=1, parts=2, rank=1, number=2, norm="rows", fmt="q4_0", peers=False, used=0):
        self.m, self.rank, self.number, self.peers = m, rank, number, peers
        rng = np.random.default_rng(parts)
        self.total = AllReduce(m=m, n=N, parts=parts, residual=True, norm_out=norm)
        self.product, self.exact, arrays = experts(fmt, used) if used else linear(fmt, m)
        scale = np.abs(self.exact).max()
        before = (scale * rng.standard_normal((m, N))).astype(np.float32)
        self.others = (scale * rng.standard_normal((parts, m, N))).astype(np.float16)
        # words of a workgroup's block, of all tokens, are side by side
        words = self.others.view(np.int64).reshape(parts, m, N // 32, 8).swapaxes(1, 2).reshape(parts, -1)
        self.capacity = words.shape[1] + 8
        self.inbox = np.full((parts - 1, 2, self.capacity), EMPTY, np.int64)
        for of in range(parts):
            if of != rank:
                self.inbox[row(of, rank), number & 1, : words.shape[1]] = words[of]
        boxes = [np.full((2, self.capacity), EMPTY, np.int64) for _ in range(parts - 1 if peers else 1)]
        control = np.zeros(CONTROL, np.int32)
        control[[DONE, RANK]] = (number - 1) * GROUPS, rank
        names = ("Y", "P", *(("An", "Sn", "NewSquares") if norm else ()))
        results = {name: np.zeros(*of) for name, of in zip(names, self.total.results(), strict=True)}
        self.arrays = {
            "state": np.array([m, m, 0, 0], np.int32),
            "R": before,
            "Y0": np.full((m, N), np.nan, np.float32),
        }
        self.arrays |= arrays
        self.arrays |= ({"NG": rng.standard_normal(N).astype(np.float32)} if norm else {}) | results
        self.arrays |= {"Inbox": self.inbox} | {f"Outbox{i}": box for i, box in enumerate(boxes)} | {"Control": control}

    def kernel(self, arch, **options):
        return joint(self.product, self.total, self.capacity, arch, "k", self.peers, **options)

    def check(self):
        """Sums are exact: of this product in float16, too."""
        found = self.arrays
        assert np.abs(found["Y0"] - self.exact).max() <= TOLERANCE * np.abs(self.exact).max()
        parts = self.others.astype(np.float32)
        parts[self.rank] = sent = found["Y0"].astype(np.float16)
        expected = found["R"]
        for part in parts:
            expected = expected + part
        np.testing.assert_array_equal(found["Y"], expected)
        words = sent.view(np.int64).reshape(self.m, N // 32, 8).swapaxes(0, 1).reshape(-1)
        for name in (name for name in found if name.startswith("Outbox")):
            np.testing.assert_array_equal(found[name][self.number & 1, : len(words)], words)
            assert (found[name][self.number & 1, len(words) :] == EMPTY).all()
            assert (found[name][~self.number & 1] == EMPTY).all()
        assert (found["Inbox"] == EMPTY).all()
        assert found["Control"].tolist() == [self.number * GROUPS, 0, self.rank, 0]
        if self.total.norm_out:
            rows = np.arange(self.m)
            wanted = operators.results(Reference(self.total, found | {"P": parts, "X": sent}, "gpu", rows))
            np.testing.assert_allclose(found["NewSquares"], wanted["NewSquares"].value, rtol=1e-5)
            scaled = wanted[""].value
            error = np.abs(read("rows", found, "n", rows)[:, :N] - scaled).max()
            assert error <= 0.501 / 127 * np.abs(scaled).max()


def emulated(case, arch, wave_order=3, **options):
    kernel = case.kernel(resolve(arch), **options)
    module = compile_hsaco({"k": kernel}, resolve(arch))
    check_no_spills(module)
    emulate(module, "k", {param.name: case.arrays[param.name] for param in kernel.params}, wave_order)


CASES = sample(
    [
        {},
        {"m": 2, "parts": 3, "number": 7},
        {"m": 8, "rank": 0},
        {"norm": "", "fmt": "f16"},
        {"parts": 8, "rank": 5},
        {"used": 8, "fmt": "q4_k"},
        {"used": 3},
        {"used": 6, "fmt": "q8_0", "parts": 3},
    ],
    [{}, {"m": 2, "parts": 3, "number": 7}, {"used": 8, "fmt": "q4_k"}],
)


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("profile", sample(["rdna3", "vangogh", "nvidia"], ["nvidia"]))
def test_sums_on_vulkan(profile, options):
    case, arch = Case(**options), profiles.resolve(profile)
    execute(case.kernel(arch), case.arrays, arch)
    case.check()


@pytest.mark.emulator
@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("arch", sample(["gfx1100", "gfx1201", "gfx942"], ["gfx1100"]))
def test_sums_in_the_emulator(emulator, linker, arch, options):
    case = Case(peers=True, **options)
    emulated(case, arch)
    case.check()


@pytest.mark.emulator
@pytest.mark.parametrize("seed", range(3))
def test_words_come_in_any_order_while_the_kernel_runs(emulator, linker, seed):
    """Each half of a word of the others alone, of the last workgroup perhaps before those of the first."""
    case = Case(parts=3, peers=True)
    words, case.inbox[...] = case.inbox.copy().view(np.int32), EMPTY

    def others():
        time.sleep(0.05)
        for place in np.random.default_rng(seed).permutation(words.size):
            if words.reshape(-1)[place] != EMPTY:
                case.inbox.view(np.int32).reshape(-1)[place] = words.reshape(-1)[place]
                time.sleep(0.001)

    writer = threading.Thread(target=others)
    writer.start()
    emulated(case, "gfx1100", seed)
    writer.join()
    case.check()


def test_an_absent_gpu_is_an_error():
    case, arch = Case(), profiles.resolve("nvidia")
    case.inbox.view(np.int32)[0, 0, 17] = EMPTY  # half a word
    execute(case.kernel(arch, polls=20), case.arrays, arch)
    assert case.arrays["Control"][FAILED] == 1
    case = Case()
    case.arrays["Control"][FAILED] = 1
    execute(case.kernel(arch, polls=20), case.arrays, arch)
    assert (case.arrays["Outbox0"] == EMPTY).all() and (case.arrays["Y"] == 0).all()


def test_what_is_joint():
    """Half of the down projection of Llama 3 8B and 70B: 128 blocks of 8 bits are too few for 304 compute units, and
    too many for 4."""
    arch = resolve("gfx942"), resolve("gfx1100"), profiles.resolve("nvidia"), profiles.resolve("lavapipe")
    for fmt, n, k, expected in (("q8_0", 4096, 7168, [False, True, True]), ("q4_0", 8192, 14336, [True] * 3)):
        down, total = linear_op([(fmt, n)], k, 1, "rows"), AllReduce(m=1, n=n, parts=2, residual=True)
        assert [can_join(down, total, one) for one in arch] == [*expected, False]
        assert not can_join(down, replace(total, half=True), arch[1])
    down, _, _ = experts("q4_0", 4)  # of gpt-oss 120B: 90 blocks
    down, total = replace(down, n=2880, k=1440), replace(total, n=2880)
    assert [can_join(down, total, one) for one in arch] == [False, True, True, False]
    for used, k, expected in ((8, 256, True), (2, 64, False), (1, 256, False)):  # lanes have more rows than a block
        down, _, _ = experts("q4_k", used)
        assert [can_join(replace(down, k=k), replace(total, n=N), one) for one in arch[:3]] == [expected] * 3
