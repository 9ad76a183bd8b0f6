"""Object code that is kept: what counts as the same kernel, and how much is held."""

import tvm

from mlc_amd.compiler.codegen.object_cache import ObjectCache
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.cpu.linear.quantize import quantize
from mlc_amd.schedules.operators import Quantize


def kernel(k: int, name: str):
    return quantize(Quantize(k=k, m=1, layout="tiles:1"), resolve("x86-64-v3"), name)


def test_the_same_kernel_for_the_same_target_is_compiled_once():
    cache, made, target = ObjectCache(), [], resolve("x86-64-v3").target
    other = resolve("x86-64-v2").target

    def get(k: int, name: str, where: tvm.target.Target) -> bytes:
        return cache.get(name, kernel(k, name), where, lambda: made.append((k, name)) or str(len(made)).encode())

    assert get(64, "a", target) == get(64, "a", target) == b"1"
    found = [get(96, "a", target), get(64, "b", target), get(64, "a", other), get(64, "a", target)]
    assert found == [b"2", b"3", b"4", b"1"]


def test_the_least_recently_used_goes_first():
    cache, made, target = ObjectCache(limit=25), [], resolve("x86-64-v3").target

    def get(name: str) -> None:
        cache.get(name, kernel(64, name), target, lambda: made.append(name) or bytes(10))

    for name in "ababcab":
        get(name)
    assert made == ["a", "b", "c", "a", "b"]
