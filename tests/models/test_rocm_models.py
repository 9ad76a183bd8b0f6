"""The rocm target from GGUF to logits. Compiling needs a linker for AMD code; models run in the ISA emulator."""

import gzip
import re

import further_architectures
import numpy as np
import pytest
import reference
import vision_models
from emulator_suite import MAX_KL, check_architecture, check_model, compiled_functions, emulated_device
from few_functions import few_functions
from hip_tensor import machine
from samples import sample

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.encoder import ImageEncoder
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.linear import gemm_matrix, gemm_matrix_int8, norm_place
from mlc_amd.schedules.gpu.linear.gemm_matrix import MatrixTile
from tests.dev.hip_emulated import emulated
from tests.dev.quality import Reference, kl_divergence

pytestmark = pytest.mark.usefixtures("linker")


@pytest.fixture
def rocm(compiled_for):
    """rocm(source, arch, few) -> artifact with 64 tokens of context, compiled once; few: with few functions."""
    return lambda source, arch, few=False: Artifact.open(compiled_for("rocm", arch, source, 64, few=few))


TWO = "7900xtx,gfx1201"  # GPUs that share an artifact
# Each family of GPUs, and an artifact for two. LLVM takes more than ten seconds for one.
FEW_OF = ("tiny:q4_0", "gfx1100", True)
MODELS = (FEW_OF, ("tiny:q4_0", "gfx1100", False), ("tiny-qwen2:q4_0", "gfx1030", False))
MODELS += (("tiny-qwen3:q4_k", "gfx942", False), ("tiny:q4_0", TWO, False))


@pytest.mark.parametrize(("spec", "archs", "few"), sample(MODELS, [FEW_OF]))
def test_artifact(rocm, spec, archs, few):
    """Five launches a layer in decode, no scratch memory, no spilled registers in any kernel, for each GPU."""
    artifact = rocm(spec, archs, few)
    manifest, archs = artifact.manifest, archs.replace("7900xtx", "gfx1100").split(",")
    layers = len(manifest["model"]["layers"])
    assert manifest["target"]["archs"] == archs
    assert set(manifest["libraries"]) == set(manifest["launches"]) == set(archs)
    assert len(manifest["functions"]["decode"]["launches"]) == 5 * layers + 3
    for arch in archs:
        launches = manifest["launches"][arch]
        decode = {step["kernel"] for step in manifest["functions"]["decode"]["launches"]}
        assert [len(launches[name]["steps"]) for name in decode if not name.startswith("sample")] == [1] * (
            len(decode) - 1
        )
        kernels = hsaco.parse((artifact.path / manifest["libraries"][arch]).read_bytes()).kernels
        for step in (step for launch in launches.values() for step in launch["steps"]):
            kernel = kernels[step["symbol"]]
            assert kernel.scratch == kernel.vgpr_spills == 0, kernel
            # scalars may go to lanes of vector registers, which no memory sees, in a kernel that runs once a step
            assert kernel.sgpr_spills == 0 or step["symbol"].startswith("sample"), kernel


@pytest.mark.parametrize(("spec", "arch", "instruction"), [
    ("tiny:q4_0", "gfx1100", "v_wmma"),
    pytest.param("tiny-qwen3:q4_k", "gfx942", "v_mfma", marks=pytest.mark.full),
])  # fmt: skip
def test_prefill_runs_on_matrix_units(rocm, spec, arch, instruction):
    artifact = rocm(spec, arch, few=True)
    text = gzip.decompress((artifact.path / f"kernels-{arch}.s.gz").read_bytes()).decode()
    launches, functions = artifact.manifest["launches"][arch], artifact.manifest["functions"]
    called = {
        step["kernel"]
        for name, function in functions.items()
        if function["rows"] > FEW
        for step in function["launches"]
    }
    multiplied = [
        name for name in called if name.startswith(("linear", "gate_up")) and not re.search(r"_m1(_\d+)?$", name)
    ]
    assert len(multiplied) >= 4
    for name in multiplied:
        for step in launches[name]["steps"]:
            assert hsaco.instructions(text, step["symbol"]).matrix > 0, name
            assert instruction in text


def test_archs_of_different_layouts_do_not_share_an_artifact(rocm):
    with pytest.raises(UserError, match="gfx1100 and gfx1030 need different layouts"):
        rocm("tiny:q4_0", "gfx1100,gfx1030")


def test_unknown_arch(rocm):
    with pytest.raises(UserError, match="unknown AMD GPU 'gfx9999'"):
        rocm("tiny:q4_0", "gfx9999")


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
@pytest.mark.parametrize("spec", ["tiny:q4_0", "tiny-qwen3:q4_k"])
@pytest.mark.parametrize("wave_order", ["fwd", 5])
def test_in_the_emulator(rocm, emulator, spec, arch, wave_order, monkeypatch):
    artifact = rocm(spec, "gfx942" if arch == "gfx942" else TWO)
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    check_model(artifact, spec, arch, emulator, wave_order)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("name", ["llamaspm-q8_0", "qwen3-q8_0"])  # llama.cpp's are closest to exact
def test_int8_products_are_no_less_exact_than_llamacpp(shared, emulator, name, arch, tmp_path, monkeypatch):
    """Of gate and up; `tune` may choose them. Of a trained model, whose activations have outliers."""
    rule = gemm_matrix.choose

    def choose(of):
        return MatrixTile(64, 64, 1, 4, 1, int8=1) if gemm_matrix_int8.suits(of) else rule(of)

    monkeypatch.setattr(gemm_matrix, "choose", choose)
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    expected = Reference(shared, name)
    with GGUFModel.open(shared / "models" / f"{name}.gguf") as model:
        with few_functions():
            compile_model(model, tmp_path / "model", CompileOptions(target="rocm", arch=arch, ctx=512))
        ids = expected.arrays["ids"]
        exact = reference.forward(model, ids)
    artifact = Artifact.open(tmp_path / "model")
    found = Engine(artifact, emulated_device(artifact, arch, emulator)).score(ids)
    assert 1e-5 < kl_divergence(exact, found) < expected.facts["summary"]["kl_llamacpp_vs_exact_mean"]


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
@pytest.mark.parametrize("count", [5, 12, 20])
def test_steps_of_many_sequences_in_the_emulator(rocm, emulator, arch, count, monkeypatch):
    """Steps of 8, 16 and 32 rows, which take matrix units: of each sequence the logits of its tokens."""
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    artifact = rocm("tiny-qwen3:q4_k", "gfx942") if arch == "gfx942" else rocm("tiny:q4_0", TWO)
    spec = "tiny-qwen3:q4_k" if arch == "gfx942" else "tiny:q4_0"
    ids = np.random.default_rng(7).integers(0, 1024, (count, 2))
    engine = Engine(artifact, emulated_device(artifact, arch, emulator, kv=KvSize(tokens=64 * count)))
    steps = []
    with engine.batch(count) as batch:
        for i in range(2):
            batch.step(ids[:, i].tolist())
            steps.append(engine.device.read("logits", count)[:, : engine.vocab].copy())
    made = np.stack(steps, 1)
    exact = np.stack([reference.forward(synthetic(spec), own) for own in ids])
    assert kl_divergence(exact.reshape(2 * count, -1), made.reshape(2 * count, -1)) < MAX_KL


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3}])
def test_steps_that_begin_ahead_in_the_emulator(rocm, emulator, arch, options, monkeypatch):
    """Answers are those of steps one by one, also where how tokens are chosen is known late."""
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    artifact = rocm("tiny-qwen3:q4_k", "gfx942") if arch == "gfx942" else rocm("tiny:q4_0", TWO)
    engine = Engine(artifact, emulated_device(artifact, arch, emulator, kv=KvSize(tokens=256)))
    begun, start_ahead = [], engine.device.start_ahead
    engine.device.pacer.limit = 1e4  # an emulator takes its time

    def begin(name, late=False):
        begun.append(late)
        start_ahead(name, late)

    def answers():
        engine.reset()
        made = {0: [], 1: []}
        for piece in engine.generate([[1, 2, 3], [7] * 5], max_tokens=12, **options):
            made[piece.index].append(piece.id)
        return made

    monkeypatch.setattr(engine.device, "start_ahead", begin)
    found = answers()
    assert len(begun) > 5 and set(begun) == {"repetition_penalty" in options}
    monkeypatch.setattr(engine.device, "can_start_ahead", lambda name, late=False: False)
    assert answers() == found


ARCHITECTURES = (
    "llama", "qwen3", "qwen3moe", "gpt-oss", "gemma3", "gemma4", "deepseek2", "kimi-linear", "lfm2", "qwen35",
    "granitehybrid", "bloom", "deepseek32", "mamba", "minimax-01",
)  # fmt: skip


@pytest.mark.full  # test_emulator_gfx1100.py has one
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942", "gfx950"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_in_the_emulator(emulator, tmp_path, name, arch, monkeypatch):
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    check_architecture(name, arch, emulator, tmp_path)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
@pytest.mark.parametrize("name", ["deepseek2", "granitehybrid", "lfm2", "qwen35moe"])
def test_exact_logits_in_the_emulator(shared, emulator, tmp_path, name, arch, monkeypatch):
    """A prefill chunk, of blocks of eight and sixteen rows and one row more, and a decode step of a random f16 model
    against logits that llama.cpp computed from the same weights in float32."""
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    path = tmp_path / "model.gguf"
    _, exact = further_architectures.referenced(shared, name, path)
    with GGUFModel.open(path) as model:
        compile_model(model, tmp_path / "rocm", CompileOptions(target="rocm", arch=arch, ctx=512))
    artifact = Artifact.open(tmp_path / "rocm")
    engine = Engine(artifact, emulated_device(artifact, arch, emulator))
    made = np.stack([engine.prefill(exact["ids"][:17]), engine.decode(int(exact["ids"][17]))])
    assert kl_divergence(exact["logits"][np.isin(exact["positions"], (16, 17))], made) < MAX_KL


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
def test_image_encoder_in_the_emulator(emulator, tmp_path, arch, monkeypatch):
    """Float16 matrices and two packed images, on matrix units, against llama.cpp's features of float32 ones."""
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    artifact = seeing_artifact(tmp_path, arch)
    pixels = vision_models.pixels("gemma3")
    images = [PreparedImage.of(one, 16, (1, 16), "") for one in (pixels[:, ::-1], pixels)]
    _, found = ImageEncoder(artifact, emulated_device(artifact, arch, emulator)).encode(images)
    expected = vision_models.features("gemma3")
    assert found.dtype == np.float16
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("arch", sample(["gfx1100", "gfx942"], ["gfx1100"]))
def test_kernels_of_an_image_encoder(tmp_path, arch):
    """Neither scratch memory nor spilled registers; products and attention on matrix units."""
    artifact = seeing_artifact(tmp_path, arch)
    launches, functions = artifact.manifest["launches"][arch], artifact.manifest["functions"]
    called = {step["kernel"] for name, one in functions.items() if name.startswith("image") for step in one["launches"]}
    steps = {step["symbol"] for name in called for step in launches[name]["steps"]}
    kernels = hsaco.parse((artifact.path / artifact.manifest["libraries"][arch]).read_bytes()).kernels
    assert not [kernels[name] for name in steps if kernels[name].scratch or kernels[name].vgpr_spills]
    text = gzip.decompress((artifact.path / f"kernels-{arch}.s.gz").read_bytes()).decode()
    multiplied = {name.split("_")[0] for name in steps if hsaco.instructions(text, name).matrix}
    assert multiplied >= {"linear", "packed"}


def seeing_artifact(folder, arch) -> Artifact:
    """A model whose image encoder has float16 matrices."""
    vision_models.write(folder / "mmproj.gguf", "gemma3", np.float16)
    model = synthetic("tiny-qwen2:f16", keys=vision_models.DECODER)
    model.add_vision(VisionFile(folder / "mmproj.gguf"))
    return compiled_functions(model, arch, folder / "model")


@pytest.mark.full
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
def test_norms_that_linears_prepare(arch, tmp_path, monkeypatch, emulator):
    """Of one row, too, whose norms a small model's linears would compute for themselves."""
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    monkeypatch.setattr(norm_place, "holds_norm", lambda k, arch: False)
    compile_model(
        synthetic("tiny:q4_0"), tmp_path / "model", CompileOptions(target="rocm", arch=arch, ctx=64, tuned="none")
    )
    artifact = Artifact.open(tmp_path / "model")
    kernels, layers = {entry["name"]: entry for entry in artifact.manifest["kernels"]}, 2
    for function in ("decode", "step_8"):
        args = [kernels[step["kernel"]]["args"] for step in artifact.manifest["functions"][function]["launches"]]
        assert sum(bool(of.get("norm_out")) for of in args) == 2 * layers and len(args) == 5 * layers + 4
    check_model(artifact, "tiny:q4_0", arch, emulator, wave_order=5)


@pytest.mark.full
@pytest.mark.emulator
def test_gpus_that_share_a_model(emulator, tmp_path, monkeypatch):
    """Two GPUs that get one another's parts in copies: the emulator runs one kernel at a time."""
    monkeypatch.setenv("MLC_AMD_GRAPH", "0")
    options = CompileOptions(target="rocm", arch="gfx1100", ctx=64, split="tensor", gpus=2, tuned="none")
    with few_functions():
        compile_model(synthetic("tiny:q4_0"), tmp_path / "model", options)
    artifact = Artifact.open(tmp_path / "model")
    code = (artifact.path / artifact.manifest["libraries"]["gfx1100"]).read_bytes()
    kernels = emulated(artifact.manifest, "gfx1100", code, emulator, 5)
    bindings = machine(monkeypatch, 2, kernels, gpus=[{}, {"peers": False}])
    ids = np.random.default_rng(7).integers(0, 1024, 12)
    exact = reference.forward(synthetic("tiny:q4_0"), ids)
    with Engine.load(artifact.path, RunOptions(devices=(0, 1))) as engine:
        last = [engine.prefill(ids[:10]), *(engine.decode(int(i)) for i in ids[10:])]
    assert kl_divergence(exact[9:], np.stack(last)) < MAX_KL
    assert bindings.leaks() == []
