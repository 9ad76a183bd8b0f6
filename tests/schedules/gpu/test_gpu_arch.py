"""The table of AMD GPUs: names resolve, and it agrees with what LLVM knows."""

import pytest

from mlc_amd.compiler.codegen.hsaco import MACHINES
from mlc_amd.runtime.errors import UserError
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


def test_products_are_unique_and_resolve():
    assert len(PRODUCTS) == sum(len(arch.products) for arch in ARCHS.values())
    assert all(resolve(product) is arch for product, arch in PRODUCTS.items())


def test_every_arch_is_described():
    assert set(ARCHS) == set(MACHINES.values())
    assert {arch.family for arch in ARCHS.values()} == set(FAMILIES)


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
