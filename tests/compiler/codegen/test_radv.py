"""What AMD's GPUs would run for our SPIR-V, as RADV compiles it without them; and `mlc-amd inspect` on vulkan
artifacts.

Skips without RADV, or with one that cannot assume a GPU.
"""

import itertools
import json
import re
from dataclasses import replace

import encoders
import numpy as np
import pytest
import vision_models
from few_functions import FUNCTIONS, few_functions
from samples import sample
from workloads import built, gate_up_op, linear_op, operator

from mlc_amd.compiler.codegen import radv, spirv_reader
from mlc_amd.compiler.codegen.gpu_target import GpuTarget
from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.exchange.exchange import exchange
from mlc_amd.schedules.gpu.linear.gemv import linear
from mlc_amd.schedules.operators import AllReduce, PackedAttention, Sample
from mlc_amd.tools.inspection import inspect_vulkan

ARCH = "vangogh"
DOT = re.compile(r"\bv_dot4c?_i32_iu?8")
WIDE = re.compile(r"^\s+(global_load_(?:dwordx4|b128)|s_load_(?:dwordx(?:4|8|16)|b128|b256|b512))\b", re.M)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """A tiny model for the Steam Deck's GPU, with one function of each kind."""
    out = tmp_path_factory.mktemp("radv") / "model"
    with synthetic("tiny:q4_0") as model, few_functions((*FUNCTIONS, "step_8", "mixed_64")):
        compile_model(model, out, CompileOptions(target="vulkan", arch=ARCH, ctx=64))
    return out


@pytest.fixture(scope="module")
def code(artifact):
    """Its modules, compiled."""
    (code,) = inspect_vulkan.of_artifact(Artifact.open(artifact))
    if code.report is None:
        pytest.skip(code.missing)
    return code


def reported(kernels, profile, on_matrices=False):
    """(what RADV makes of kernels, of how many modules); skips without RADV, or one without the cooperative matrices
    that they need."""
    try:
        device = radv.statistics([], profile).device
    except UserError as error:
        pytest.skip(str(error))
    if on_matrices and int(re.search(r"Mesa (\d+)", device)[1]) < 25:
        pytest.skip(f"{device} knows no cooperative matrices")
    modules = compile_spirv(kernels, profile).modules
    shaders = [radv.Shader(name, one.binary, tuple(one.block), profile.push) for name, one in modules.items()]
    return radv.statistics(shaders, profile), len(modules)


def statistics(kernels, profile):
    """The same by name of the module; it refuses none."""
    report, count = reported(kernels, profile)
    assert len(report.kernels) == count, report.refused
    return report.kernels


def shader(segments, k, profile):
    """The GEMV of one token as `radv` takes it."""
    func = linear(linear_op(segments, k, 1, "rows", [False] * len(segments), False), profile, "gemv")
    ((name, kernel),) = compile_spirv({"gemv": func}, profile).modules.items()
    return radv.Shader(name, kernel.binary, tuple(kernel.block), profiles.ADDRESS * len(func.params))


def test_no_kernel_uses_scratch(code):
    for kernel in code.describe()["kernels"]:
        assert kernel["scratch"] == kernel["vgpr_spills"] == kernel["sgpr_spills"] == 0, kernel["name"]
        assert kernel["occupancy"]["waves"] >= 4, kernel["name"]


def test_modules_are_valid(code):
    for shader in code.shaders.values():
        try:
            spirv_reader.validate(shader.code)
        except UserError as error:
            if "no spirv-val" in str(error):
                pytest.skip(str(error))
            raise


def test_linear_layers_use_packed_products(code):
    """Every kernel that multiplies int8 activations, by signed bytes: unsigned ones would be emulated there."""
    linears = [kernel for kernel in code.describe()["kernels"] if kernel["name"].startswith(("linear", "gate_up"))]
    assert {kernel["name"].split("_m")[1].split("_")[0] for kernel in linears} > {"1"}  # decode's and prefill's
    for kernel in linears:
        used = {
            name
            for name in kernel["instructions"]["by_mnemonic"]
            if name.startswith(("v_dot", "v_mul_lo", "v_mul_i32"))
        }
        assert used and all(DOT.match(name) for name in used), kernel["name"]
        assert kernel["instructions"]["dot"] >= kernel["spirv"]["dot"] >= 8


@pytest.mark.parametrize(
    ("fmt", "arch"),
    sample(
        itertools.product(("q4_0", "q4_k", "q6_k"), (ARCH, "rdna3:matrix=none")),
        [("q4_0", ARCH), ("q6_k", ARCH), ("q4_k", "rdna3:matrix=none")],
    ),
)
def test_gemv_loads_wide(fmt, arch):
    """Weights and activations of a model-sized row arrive by 128 bits, several loads under way before the first is
    used."""
    profile = profiles.resolve(arch)
    source = shader([(fmt, 4096)], 4096, profile)
    try:
        compiled = radv.statistics([source], profile).kernels[source.name]
    except UserError as error:
        pytest.skip(str(error))
    assert compiled.kernel.scratch == compiled.kernel.vgpr_spills == 0 and compiled.kernel.vgprs <= 128
    assert DOT.search(compiled.assembly)
    before_use = DOT.split(compiled.assembly, maxsplit=1)[0]
    assert len(WIDE.findall(before_use)) >= 8


QWEN3 = {"experts": 128, "used": 8}  # of qwen3-30b-a3b
EXPERTS = {
    "expert_gate_up": {"gate": "q4_k", "up": "q4_k", "n": 768, "k": 2048, "biases": False, "act": "silu"},
    "expert_down": {"fmt": "q6_k", "n": 2048, "k": 768, "bias": False, "weighted": True, "residual": True},
    "expert_linear": {"fmt": "q6_k", "n": 2048, "k": 768, "bias": False},
}


@pytest.mark.parametrize("arch", [ARCH, "rdna3:matrix=none"])
def test_experts_use_no_scratch(arch):
    profile, kernels = profiles.resolve(arch), {}
    for op, m in (("expert_gate_up", 1), ("expert_down", 1), ("expert_gate_up", 512), ("expert_linear", 512)):
        args = EXPERTS[op] | QWEN3 | {"tile": 1 if m == 1 else 32, "m": m, "layout": "rows"}
        if op == "expert_gate_up":
            args |= {"layout_in": "rows", "shared": m == 1}
        name = f"{op}_{m}"
        kernels[name] = built(operator(op, args), profile, name)
    found = statistics(kernels, profile)
    assert len(found) == len(kernels)
    for name, compiled in found.items():
        kernel = compiled.kernel
        assert kernel.scratch == kernel.vgpr_spills == 0 and kernel.vgprs <= 128, (name, kernel)
        assert DOT.search(compiled.assembly) and WIDE.search(compiled.assembly), name


KDA = {"heads": 32, "d": 128}  # of kimi-linear-48b-a3b
LATENT = {"heads": 32, "kv_heads": 1, "d": 576, "values": 512, "ctx": 4096, "scale": 192**-0.5}
CHANNELS = {"key_heads": 32, "value_heads": 32, "d": 128, "grouped": False, "eps": 1e-5, "by_channel": True}
CONVOLUTION = {"channels": 3 * 4096, "taps": 4, "gated": False, "act": "silu", "bias": False, "parts": 3}


@pytest.mark.parametrize(
    "arch", [ARCH, pytest.param("rdna3", marks=pytest.mark.full), pytest.param("rdna4", marks=pytest.mark.full)]
)
def test_states_that_decay_by_channel_use_no_scratch(arch):
    profile, kernels = profiles.resolve(arch), {}
    for m, single in ((1, 1), (8, 8), (512, 0), (512, 32)):
        for op, args in (("delta_net", CHANNELS), ("causal_conv", CONVOLUTION)):
            name = f"{op}_{m}_{single}"
            kernels[name] = built(operator(op, args | {"m": m, "single": single}), profile, name)
        writes = LATENT | {"neox": False, "rotary": 0, "eps": 1e-5}
        for op, args in (("channel_decay", KDA), ("latent_kv_write", writes)):
            kernels[f"{op}_{m}"] = built(operator(op, args | {"m": m}), profile, f"{op}_{m}")
    found = statistics(kernels, profile)
    assert len(found) == len(kernels)
    for name, compiled in found.items():
        assert compiled.kernel.scratch == compiled.kernel.vgpr_spills == 0, (name, compiled.kernel)


@pytest.mark.parametrize("arch", [ARCH, *(pytest.param(arch, marks=pytest.mark.full) for arch in ("rdna3", "rdna4"))])
def test_quantized_caches_use_no_scratch(arch):
    """Of 4 bits, and of latents."""
    profile, kernels = profiles.resolve(arch), {}
    codes, latents = {"heads": 32, "kv_heads": 8, "d": 128, "ctx": 16384, "kv": "q4_0"}, LATENT | {"kv": "q8_0"}
    calls = [("quantize", {"k": 4096, "m": 512, "layout": "rows", "rotation": 128})]
    calls += [("rope_kv_write", codes | {"m": 512, "neox": True, "rotary": 128})]
    calls += [("latent_kv_write", latents | {"m": 512, "neox": False, "rotary": 64, "eps": 1e-5})]
    for layer in (codes, latents):
        calls += [("attention", layer | {"m": m, "single": single, "layout": ""}) for m, single in ((1, 1), (512, 32))]
    for i, (op, args) in enumerate(calls):
        kernels[f"{op}_{i}"] = built(operator(op, args), profile, f"{op}_{i}")
    report, count = reported(kernels, profile, bool(profile.matrix))
    assert len(report.kernels) == count, report.refused
    for name, compiled in report.kernels.items():
        assert compiled.kernel.scratch == compiled.kernel.vgpr_spills == 0, (name, compiled.kernel)


@pytest.mark.parametrize("arch", [ARCH, *(pytest.param(arch, marks=pytest.mark.full) for arch in ("rdna3", "rdna4"))])
def test_the_choice_of_tokens_uses_no_scratch(arch):
    profile, vocab = profiles.resolve(arch), 262144
    kernel = built(Sample(m=64, vocab=vocab, columns=vocab), profile, "sample")
    for name, compiled in statistics({"sample": kernel}, profile).items():
        kernel = compiled.kernel
        assert kernel.scratch == kernel.vgpr_spills == 0, (name, kernel)
        assert len(compiled.assembly.splitlines()) < 10000, name


@pytest.mark.full
@pytest.mark.parametrize("arch", ["rdna3", "rdna4"])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 4, 128), (64, 8, 64)])
def test_decode_attention_on_matrices_uses_no_scratch(arch, heads, kv_heads, d):
    profile = profiles.resolve(arch)
    args = {"heads": heads, "kv_heads": kv_heads, "d": d, "ctx": 16384, "neox": True, "rotary": d, "layout": "rows"}
    report, _ = reported({"k": built(operator("rope_attention", args | {"m": 8}), profile, "k")}, profile, True)
    for compiled in report.kernels.values():
        assert compiled.kernel.scratch == compiled.kernel.vgpr_spills == 0, compiled.kernel
        assert "v_wmma_f32_16x16x16_f16" in compiled.assembly


@pytest.mark.parametrize("d", [pytest.param(160, marks=pytest.mark.full), 256])
@pytest.mark.parametrize("arch", ["rdna3", pytest.param("rdna4", marks=pytest.mark.full)])
def test_attention_with_wide_heads_uses_no_scratch(arch, d):
    """As Qwen 3.5's: registers hold a part of the queries, so that there is room for the outputs."""
    profile = profiles.resolve(arch)
    args = {"heads": 24, "kv_heads": 4, "d": d, "ctx": 4096, "m": 512, "single": 0, "layout": ""}
    report, _ = reported({"attention": built(operator("attention", args), profile, "attention")}, profile, True)
    ((_, compiled),) = report.kernels.items()
    assert compiled.kernel.scratch == compiled.kernel.vgpr_spills == 0, compiled.kernel


HEAVY = ("q4_0", "q4_k", "q6_k", "mxfp4", "f32")


@pytest.mark.parametrize(
    ("fmt", "arch"),
    sample(itertools.product(HEAVY, ("rdna3", "rdna4")), [("q4_0", "rdna3"), ("q6_k", "rdna4")]),
)
def test_products_of_matrices_use_no_scratch(fmt, arch):
    """At a model's size; operands are made in registers, and weights load wide."""
    profile, kernels, lanes = profiles.resolve(arch), {}, "lanes:2"
    for m in (16, 64, 512):
        ops = linear_op([(fmt, 4096)], 4096, m, lanes, (True,)), gate_up_op(fmt, fmt, 14336, 4096, m, lanes, lanes)
        kernels |= {
            f"{kind}_{m}": built(op, profile, kind) for kind, op in zip(("linear", "gate_up"), ops, strict=True)
        }
    report, _ = reported(kernels, profile, True)
    for name, compiled in report.kernels.items():
        kernel, products = compiled.kernel, compiled.assembly.count("v_wmma_f32_16x16x16_f16")
        assert kernel.scratch == kernel.vgpr_spills == 0 and products >= 4, (name, kernel)
        assert len(re.findall(r"global_load_(?:b128|dwordx4)\b", compiled.assembly)) >= 4, name
    assert len(report.kernels) == len(kernels)


def test_inspect_tables_and_assembly(inspect, artifact, code):
    out, err = inspect(artifact, "--kernels")
    assert err == "" and f"code for {ARCH}, compiled by {code.report.device}" in out and "VGPRs" in out
    report = json.loads(inspect(artifact, "--json").out)
    (found,), (bounds,) = report["code"], report["bounds"]
    assert {row["unit"] for row in bounds["kernels"] if row["kernel"].startswith("linear")} == {"dot4"}
    assert found["compiler"] == code.report.device and {kernel["name"] for kernel in found["kernels"]} == set(
        code.shaders
    )
    name = next(name for name in code.shaders if name.startswith("linear") and "_m1" in name)
    isa = inspect(artifact, "--asm", name).out
    assert isa.startswith(f"; {ARCH}\n{name}:\n") and DOT.search(isa) and "s_endpgm" in isa


def test_inspect_without_radv(inspect, artifact, monkeypatch):
    monkeypatch.setattr(radv, "DRIVER_FOLDERS", ())
    for variable in radv.DRIVER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    out, err = inspect(artifact, "--kernels")
    assert "mesa-vulkan-drivers" in err and err.count("\n") == 1
    assert f"code for {ARCH}, not compiled" in out and "DotProduct" in out and "VGPRs" not in out
    assert "SPIR-V is no instruction set" in out and f"bounds for {ARCH}: 88 GB/s; TOPS: fma 1.6, " in out
    try:
        spirv_reader.disassemble(next(iter(Artifact.open(artifact).path.glob("*.spv"))).read_bytes()[:0])
    except UserError as error:
        if "install SPIRV-Tools" in str(error):
            pytest.skip(str(error))
    assert "OpSDot" in inspect(artifact, "--asm", "linear*").out


def test_a_crashing_driver_is_told(code):
    """RADV aborts on such a module; the others still come."""
    source = next(iter(code.shaders.values()))
    broken = [replace(source, name=name, code=source.code[:20] + bytes(40)) for name in ("broken", "too")]
    report = radv.statistics([broken[0], source, broken[1]], profiles.resolve(ARCH))
    assert set(report.kernels) == {source.name} and set(report.refused) == {"broken", "too"}
    assert report.kernels[source.name] == code.report.kernels[source.name]
    assert "it crashed with SIG" in report.refused["too"]


def test_other_makers_gpus():
    with pytest.raises(UserError, match="for AMD GPUs only"):
        radv.statistics([], profiles.resolve("nvidia"))


def test_unknown_gpu(code, monkeypatch):
    monkeypatch.setitem(radv.GPUS, ARCH, ("gfx1033", ("NOSUCHGPU",)))
    with pytest.raises(UserError, match=r"NOSUCHGPU.*install Mesa 22.3 to 25"):
        radv.statistics(list(code.shaders.values())[:1], profiles.resolve(ARCH))


def test_reader():
    """A module put together by hand: int32 and a workgroup array of 48 of them, a vector of four, one packed
    product."""

    def op(code, *operands):
        return [(len(operands) + 1) << 16 | code, *operands]

    words = [spirv_reader.MAGIC, 0x10600, 0, 100, 0]
    words += op(spirv_reader.CAPABILITY, 1) + op(spirv_reader.CAPABILITY, 6018) + op(spirv_reader.CAPABILITY, 9999)
    words += op(spirv_reader.EXECUTION_MODE, 1, spirv_reader.LOCAL_SIZE, 32, 4, 1)
    words += op(spirv_reader.INT, 2, 32, 1) + op(spirv_reader.CONSTANT, 2, 3, 48) + op(spirv_reader.ARRAY, 4, 2, 3)
    words += op(spirv_reader.VECTOR, 5, 2, 4)
    for pointer, kind, variable in ((6, 4, 7), (8, 5, 9)):
        words += op(spirv_reader.POINTER, pointer, spirv_reader.WORKGROUP, kind)
        words += op(spirv_reader.VARIABLE, pointer, variable, spirv_reader.WORKGROUP)
    words += op(spirv_reader.DOTS[0], 2, 10, 3, 3, 0)
    data = b"".join(word.to_bytes(4, "little") for word in words)
    facts = spirv_reader.read(data)
    assert facts.block == (32, 4, 1) and facts.lds == 48 * 4 + 16 and facts.dot == 1 and facts.matrix == 0
    assert facts.capabilities == ("Shader", "DotProductInput4x8BitPacked", "9999")
    for damaged in (data[:-4], data[:21], b"", b"\x03\x02\x23\x07" * 6):
        with pytest.raises(UserError, match="SPIR-V module"):
            spirv_reader.read(damaged)


@pytest.mark.parametrize(("name", "mark"), [("vangogh", "glc dlc"), ("rdna3", "glc")])
def test_words_between_gpus_are_polled_past_the_caches(name, mark):
    """Of a compute unit; two words at a time, as they are stored, and emptied where they came."""
    profile = profiles.resolve(name)
    kernel = exchange(AllReduce(m=1, n=8192, parts=2, residual=True), 2048, profile, "exchange")
    (found,) = statistics({"exchange": kernel}, profile).values()
    loads = re.findall(rf"global_load_(?:dwordx4|b128) .*{mark}$", found.assembly, re.M)
    stores = re.findall(r"global_store_(?:dwordx4|b128) ", found.assembly)
    sums = 2
    assert (len(loads), len(stores)) == (1, 2 + sums), found.assembly


@pytest.mark.parametrize("arch", sample(["rdna3", "rdna4"], ["rdna3"]))
@pytest.mark.parametrize("d", sample([64, 72, 80, 128], [72]))
def test_attention_of_packed_rows_on_matrices_uses_no_scratch(arch, d):
    profile, op = profiles.resolve(arch), PackedAttention(m=1024, heads=16, kv_heads=16, d=d)
    report, _ = reported({"attention": built(op, profile, "attention")}, profile, True)
    assert len(report.kernels) == 2
    for compiled in report.kernels.values():
        assert compiled.kernel.scratch == compiled.kernel.vgpr_spills == 0, compiled.kernel


def check_encoder(folder):
    """None of its kernels spills."""
    (code,) = inspect_vulkan.of_artifact(Artifact.open(folder))
    if code.report is None:
        pytest.skip(code.missing)
    kernels = [kernel for kernel in code.describe()["kernels"] if "vgprs" in kernel]
    assert any("packed_attention" in kernel["name"] for kernel in kernels)
    assert not [k["name"] for k in kernels if k["scratch"] or k["vgpr_spills"] or k["sgpr_spills"]]


@pytest.mark.parametrize("name", sample(["bert", "modern-bert"], ["bert"]))
def test_an_encoder(name, tmp_path):
    """All kernels of the functions of 64 and 512 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuTarget, "encoder_rows", (64, 512))
        compile_model(encoders.tiny(name, "q8_0"), tmp_path / name, CompileOptions(target="vulkan", arch=ARCH))
    check_encoder(tmp_path / name)


@pytest.mark.parametrize("size", sample(["tiny", "SigLIP"], ["tiny"]))
@pytest.mark.parametrize("arch", sample([ARCH, "rdna3", "rdna4"], [ARCH]))
def test_an_image_encoder(arch, size, tmp_path, monkeypatch):
    """Of float16 matrices, whose features are float16. SigLIP: layers as those of SigLIP and Qwen3-VL-8B."""
    if size == "SigLIP":
        for name, value in {"HIDDEN": 1152, "HEADS": 16, "FF": 4304, "LAYERS": 2}.items():
            monkeypatch.setattr(vision_models, name, value)
    vision_models.write(tmp_path / "mmproj.gguf", "qwen3vl_merger", np.float16)
    model = synthetic("tiny-qwen2:f16", keys=vision_models.DECODER)
    model.add_vision(VisionFile(tmp_path / "mmproj.gguf"))
    with few_functions():
        compile_model(model, tmp_path / "model", CompileOptions(target="vulkan", arch=arch, ctx=64))
    check_encoder(tmp_path / "model")
