"""Sums of several GPUs' parts: single kernels on Mesa's CPU driver and in the ISA emulator, in memory as the other GPUs
would have written it, against NumPy."""

import re
import threading
import time

import numpy as np
import pytest
from spirv_kernels import compiled
from vulkan_harness import PROFILES, run

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.exchange_layout import CONTROL, DONE, EMPTY, FAILED, GROUPS, RANK, row
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.exchange.exchange import MOST_GROUPS, ExchangePlan, default_plan, exchange
from mlc_amd.schedules.operators import AllReduce
from tests.dev.gfxemu import emulate

ARCH_NAMES = (
    "gfx1100",
    pytest.param("gfx1201", marks=pytest.mark.full),
    pytest.param("gfx942", marks=pytest.mark.full),
)
M, K, CAPACITY = 2, 144, 80  # not a whole number of rows of threads; smaller than the boxes
WORDS, ROUNDS = M * K // 4, (1 << 32) // GROUPS


class Case:
    """Parts of random numbers, some beyond float16, and what a rank finds in memory in round `number`."""

    def __init__(self, parts, rank, number, residual=True, peers=False):
        self.parts, self.rank, self.number, self.peers = parts, rank, number, peers
        rng = np.random.default_rng(parts)
        self.values = rng.standard_normal((parts, M * K)).astype(np.float32)
        self.values[:, :3] = 1e5, -1e5, 1e-6
        self.residual = rng.standard_normal(M * K).astype(np.float32) if residual else None
        self.inbox = np.full((parts - 1, 2, CAPACITY), EMPTY, np.int64)
        for of in range(parts):
            if of != rank:
                self.inbox[row(of, rank), number & 1, :WORDS] = self.words(of)
        self.outboxes = [np.full((2, CAPACITY), EMPTY, np.int64) for _ in range(parts - 1 if peers else 1)]
        self.control = np.zeros(CONTROL, np.int32)
        self.control[RANK] = rank
        self.control.view(np.uint32)[DONE] = (number - 1) % ROUNDS * GROUPS
        self.result = np.full(M * K, 7, np.float32)

    def rounded(self, of):
        return np.clip(self.values[of], -65504, 65504).astype(np.float16)

    def words(self, of):
        return self.rounded(of).view(np.int64)

    def arrays(self):
        found = {"state": np.zeros(4, np.int32), "X": self.values[self.rank], "R": self.residual, "Y": self.result}
        found |= {"P": np.full(self.parts * M * K, 7, np.float32)}
        found |= {"Inbox": self.inbox.reshape(-1)}
        found |= {f"Outbox{i}": box.reshape(-1) for i, box in enumerate(self.outboxes)}
        found |= {"Control": self.control}
        return {name: array for name, array in found.items() if array is not None}

    def kernel(self, arch, **options):
        op = AllReduce(m=M, n=K, parts=self.parts, residual=self.residual is not None)
        return exchange(op, CAPACITY, arch, "exchange", self.peers, **options)

    def check(self, found):
        expected = self.residual if self.residual is not None else np.float32(0)
        for of in range(self.parts):
            expected = expected + self.rounded(of).astype(np.float32)
        np.testing.assert_array_equal(found["Y"], expected)
        for i in range(len(self.outboxes)):
            outbox = found[f"Outbox{i}"].reshape(2, CAPACITY)
            np.testing.assert_array_equal(outbox[self.number & 1, :WORDS], self.words(self.rank))
            assert (outbox[self.number & 1, WORDS:] == EMPTY).all() and (outbox[~self.number & 1] == EMPTY).all()
        assert (found["Inbox"] == EMPTY).all()
        count = self.number % ROUNDS * GROUPS
        assert found["Control"].view(np.uint32).tolist() == [count, 0, self.rank, 0]


CASES = {
    "first of two": Case(2, 0, 1),
    "last of two": Case(2, 1, 2),
    "middle of three": Case(3, 1, 7),
    "without a residual": Case(2, 0, 4, residual=False),
    "last number": Case(2, 1, ROUNDS),
    "high count": Case(2, 1, ROUNDS // 2 + 5),
    "eight": Case(8, 5, 3),
}


def on_lavapipe(case, profile, **options):
    kernel, arrays = case.kernel(profile, **options), case.arrays()
    compiled(kernel, profile)
    return dict(zip(arrays, run(kernel, list(arrays.values()), profile), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_sums_on_vulkan(vulkan, profile, name):
    CASES[name].check(on_lavapipe(CASES[name], profile))


def test_workgroups_of_several_steps(vulkan):
    CASES["middle of three"].check(
        on_lavapipe(CASES["middle of three"], PROFILES["lavapipe"], plan=ExchangePlan(2, 16))
    )


def test_an_absent_gpu_is_an_error(vulkan):
    """The kernel ends, says so, and later ones do nothing."""
    case = Case(3, 0, 5)
    case.inbox.view(np.int32)[1, 1, 17] = EMPTY  # half a word
    found = on_lavapipe(case, PROFILES["lavapipe"], polls=100)
    assert found["Control"][FAILED] == 1
    case = Case(3, 0, 6)
    case.control[FAILED] = 1
    found = on_lavapipe(case, PROFILES["lavapipe"])
    assert found["Control"][FAILED] == 1 and (found["Outbox0"] == EMPTY).all() and (found["Y"] == 7).all()


def test_default_plans():
    for arch in (profiles.resolve("rdna3"), profiles.resolve("vangogh"), resolve("gfx1100"), resolve("gfx942")):
        for values in (256, 4096, 8192, 131072):
            plan = default_plan(values, arch)
            assert MOST_GROUPS % plan.groups == 0 and plan.threads <= arch.threads and plan.threads % arch.wave == 0
            assert plan.groups * plan.threads >= min(values // 8, MOST_GROUPS * arch.threads)
    assert default_plan(16384, resolve("gfx1100")) == ExchangePlan(64, 32)
    assert default_plan(8192, PROFILES["lavapipe"]).groups == 1


def test_sizes_that_do_not_fit_are_refused():
    for k, capacity in ((48, 64), (512, 64)):
        with pytest.raises(ValueError, match="no whole cache lines"):
            exchange(AllReduce(m=1, n=k, parts=2), capacity, PROFILES["lavapipe"], "exchange")


# ---- AMD's own code


def built(case, arch, **options):
    module = compile_hsaco({"exchange": case.kernel(resolve(arch), **options)}, resolve(arch))
    for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert set(re.findall(rf"\.{what}:\s+(\d+)", module.assembly)) == {"0"}, what
    return module


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("case", [(2, 1, 2), (3, 1, 7)], ids=["two", "three"])
@pytest.mark.parametrize("peers", [False, True], ids=["relay", "peers"])
def test_sums_in_the_emulator(emulator, linker, arch, case, peers):
    case = Case(*case, peers=peers)
    emulate(built(case, arch), "exchange", arrays := case.arrays())
    case.check(arrays)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", range(3))
def test_words_come_in_any_order_while_the_kernel_runs(emulator, linker, seed):
    """Each half of a word of the others alone: what is there when it is polled is right or missing."""
    case = Case(3, 1, 9)
    words, case.inbox[...] = case.inbox.copy().view(np.int32), EMPTY
    module, places = (
        built(case, "gfx1100", plan=ExchangePlan(2, 64)),
        np.random.default_rng(seed).permutation(words.size),
    )

    def others():
        for place in places:
            if words.reshape(-1)[place] != EMPTY:
                case.inbox.view(np.int32).reshape(-1)[place] = words.reshape(-1)[place]
                time.sleep(0.001)

    writer = threading.Thread(target=others)
    writer.start()
    emulate(module, "exchange", arrays := case.arrays(), wave_order=seed)
    writer.join()
    case.check(arrays)


@pytest.mark.emulator
def test_gives_up_in_the_emulator(emulator, linker):
    case = Case(2, 0, 3)
    case.inbox[0, 1, 5] = EMPTY
    emulate(built(case, "gfx1100", polls=20), "exchange", arrays := case.arrays())
    assert arrays["Control"][FAILED] == 1


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942", "gfx90a"])
def test_words_are_not_torn_nor_cached(linker, arch):
    """Accesses go past the caches of a compute unit: two loads, two stores of what is sent, two that empty places."""
    assembly = built(Case(2, 0, 1, peers=True), arch).assembly
    load, store = "(?:b64|b128|dwordx2|dwordx4)", "(?:b64|dwordx2)"
    loads = re.findall(rf"^\s*global_load_{load} .*\b(?:glc|sc0 sc1|scope:SCOPE_SYS)", assembly, re.M)
    stores = re.findall(rf"^\s*(?:global|flat)_store_{store} ", assembly, re.M)
    assert (len(loads), len(stores)) == (2, 4), assembly
