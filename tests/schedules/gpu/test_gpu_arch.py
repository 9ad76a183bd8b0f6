"""The table of AMD GPUs: names resolve, and it agrees with what LLVM knows."""

import pytest

from mlc_amd.compiler.codegen.hsaco import MACHINES
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import BANDWIDTH, CHIPS, MEMORY, RATES, limits, limits_of, peak_bandwidth
from mlc_amd.schedules.gpu.base.arch import ARCHS, FAMILIES, PRODUCTS, resolve


@pytest.mark.parametrize(
    ("name", "gfx"),
    [
        ("gfx1100", "gfx1100"),
        ("GFX942:sramecc+:xnack-", "gfx942"),
        ("RX 7900 XTX", "gfx1100"),
        ("AMD Radeon RX 9070 XT", "gfx1201"),
        ("rx7600", "gfx1102"),
        ("Radeon VII", "gfx906"),
        ("AMD Instinct MI300X", "gfx942"),
        ("steam-deck", "gfx1033"),
        ("Ryzen AI Max+ 395", "gfx1151"),
        ("780m", "gfx1103"),
    ],
)
def test_resolve(name, gfx):
    assert resolve(name) is ARCHS[gfx]


@pytest.mark.parametrize("name", ["", "gfx", "gfx9999", "rtx 4090", "radeon"])
def test_unknown(name):
    with pytest.raises(UserError, match=r"unknown AMD GPU .*gfx1100.*7900xtx"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3 (nvidia)", ("H100", 3352)),
        ("NVIDIA H100 PCIe", ("H100 PCIe", 2039)),
        ("NVIDIA H200", ("H200", 4800)),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31) (rdna3)", ("7900 XTX", 960)),
        ("Radeon RX 7900 XTX (gfx1100)", ("7900 XTX", 960)),
        ("AMD Radeon RX 7900 XT", ("7900 XT", 800)),
        ("AMD Radeon RX 7900M", None),
        ("AMD Radeon RX 6800/6800 XT / 6900 XT (RADV NAVI21)", ("6800 XT", 512)),
        ("AMD Radeon Graphics (RADV RENOIR)", None),
        ("AMD Radeon 780M (RADV PHOENIX)", None),
        ("AMD Radeon 8060S Graphics (RADV GFX1151)", ("8060S", 256)),
        ("AMD Custom GPU 0405 (RADV VANGOGH)", ("Custom GPU 0405", 88)),
        ("AMD Instinct MI300X", ("MI300X", 5300)),
        ("AMD Instinct MI250X / MI250 (gfx90a)", ("MI250X", 1638)),
        ("AMD Radeon PRO W7900", ("W7900", 864)),
        ("Radeon VII", ("VII", 1024)),
        ("Intel(R) HD Graphics 5500 (BDW GT2)", None),
        ("llvmpipe (LLVM 15.0.6, 256 bits) (lavapipe)", None),
        ("cpu (znver4)", None),
    ],
)
def test_bandwidth_is_that_of_the_product(name, found):
    assert peak_bandwidth(name) == found


def test_products_are_unique_and_resolve():
    assert len(PRODUCTS) == sum(len(arch.products) for arch in ARCHS.values())
    assert all(resolve(product) is arch for product, arch in PRODUCTS.items())


def test_every_card_has_memory_and_bandwidth():
    cards = {product for product in MEMORY if not CHIPS[PRODUCTS[product].name].unified}
    assert cards and all(BANDWIDTH[product] <= 1.2 * PRODUCTS[product].bandwidth for product in cards)


def test_a_chip_has_the_bandwidth_of_its_first_product():
    assert all(BANDWIDTH[chip.products[0]] == chip.bandwidth for chip in CHIPS.values() if not chip.unified)
    assert (ARCHS["gfx1030"].bandwidth, BANDWIDTH["6950xt"]) == (512, 576)


@pytest.mark.parametrize(
    ("product", "units", "ghz", "unit", "peak"),  # of AMD's product pages: TFLOPS or TOPS without sparsity
    [
        ("mi60", 64, 1.8, "fma", 14.7),
        ("mi60", 64, 1.8, "packed16", 29.5),
        ("mi60", 64, 1.8, "dot4", 58.9),
        ("mi100", 120, 1.502, "fma", 23.1),
        ("mi100", 120, 1.502, "matrix16", 184.6),
        ("mi210", 104, 1.7, "matrix16", 181.0),
        ("mi210", 104, 1.7, "matrix8", 181.0),
        ("mi210", 104, 1.7, "fma", 45.3),
        ("mi300x", 304, 2.1, "fma", 163.4),
        ("mi300x", 304, 2.1, "matrix16", 1307.4),
        ("mi300x", 304, 2.1, "matrix8", 2614.9),
        ("mi355x", 256, 2.4, "matrix16", 2516.6),
        ("mi355x", 256, 2.4, "matrix8", 5033.2),
        ("6800xt", 72, 2.25, "fma", 20.74),
        ("7900xtx", 96, 2.5, "fma", 61.4),
        ("7900xtx", 96, 2.5, "packed16", 122.8),
        ("7900xtx", 96, 2.5, "matrix16", 122.8),
        ("9070xt", 64, 2.97, "fma", 48.7),
        ("9070xt", 64, 2.97, "packed16", 97.3),
        ("9070xt", 64, 2.97, "matrix16", 195.0),
        ("9070xt", 64, 2.97, "matrix8", 389.0),
    ],
)
def test_rates_give_the_peaks_that_product_pages_state(product, units, ghz, unit, peak):
    assert units * ghz * RATES[PRODUCTS[product].family][unit] / 1e3 == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize(
    ("name", "unit", "peak"),  # of AMD's product pages of the chip's first product: TFLOPS
    [
        ("gfx90a", "fma", 45.3),
        ("gfx942", "fma", 163.4),
        ("gfx950", "fma", 157.3),
        ("gfx1010", "fma", 9.75),
        ("gfx1011", "fma", 7.4),
        ("gfx1012", "fma", 5.2),
        ("gfx1030", "fma", 20.74),
        ("gfx1031", "fma", 13.21),
        ("gfx1032", "fma", 10.6),
        ("gfx1034", "fma", 5.77),
        ("gfx1100", "fma", 61.4),
        ("gfx1101", "fma", 37.3),
        ("gfx1102", "fma", 21.75),
        ("gfx1151", "packed16", 59.4),
        ("gfx1200", "fma", 25.6),
        ("gfx1201", "matrix16", 195.0),
    ],
)
def test_a_chip_reaches_the_peak_of_its_first_product(name, unit, peak):
    assert limits_of(name).rates[unit] / 1e12 == pytest.approx(peak, rel=0.005)


def test_limits_of_a_device():
    """By hand: 96 compute units at 2.5 GHz; a product's bandwidth and chip decide where the driver's name tells it."""
    gfx1100 = limits_of("gfx1100")
    assert gfx1100.bandwidth == 960e9 and gfx1100.rates["matrix16"] == pytest.approx(96 * 2.5e9 * 512)
    assert limits(ARCHS["gfx1100"]) == gfx1100 == limits_of("rdna3", "AMD Radeon RX 7900 XTX (RADV NAVI31)")
    assert limits_of("rdna3:matrix=none", "AMD Radeon RX 7900 XT") == gfx1100._replace(bandwidth=800e9)
    assert "matrix16" not in limits_of("gfx1030").rates
    nvidia = limits_of("nvidia")
    assert limits_of("nvidia", "NVIDIA H100 80GB HBM3 (nvidia)") == nvidia._replace(bandwidth=3352e9)
    assert limits_of("lavapipe", "llvmpipe (LLVM 15.0.6, 256 bits)") == (0, {})


def test_every_arch_is_described():
    assert set(ARCHS) == set(MACHINES.values())
    assert {arch.family for arch in ARCHS.values()} == set(FAMILIES) == set(RATES) - {"nvidia"}
    for arch in ARCHS.values():
        rates = limits(arch).rates
        assert ("matrix16" in rates) == bool(arch.matrix) and ("matrix8" in rates) == bool(arch.code.int8_columns)


def test_properties():
    assert [ARCHS[name].wave for name in ("gfx906", "gfx942", "gfx1030", "gfx1201")] == [64, 64, 32, 32]
    assert [ARCHS[name].matrix for name in ("gfx906", "gfx90a", "gfx1030", "gfx1151", "gfx1200")] == [
        "",
        "mfma",
        "",
        "wmma11",
        "wmma12",
    ]
    assert ARCHS["gfx1033"].unified and not ARCHS["gfx1030"].unified
    assert [ARCHS[name].dot for name in ("gfx1010", "gfx1011", "gfx1100")] == ["", "sdot4", "sudot4"]
