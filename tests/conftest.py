"""Shared fixtures: where the optional reference data lies, the bundled model, and models compiled once for all
tests."""

import fcntl
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import quote

import architectures
import pytest
import vision_models
from few_functions import few_functions
from kept_code import keep
from llvm_levels import unoptimized

from mlc_amd.compiler.codegen import kernel_workers, vulkan_target
from mlc_amd.compiler.codegen.rocm import find_linker
from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions, LoadOptions, RunOptions
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.tools import cli
from mlc_amd.tools.hub import models
from tests.dev import gfxemu

pytest.register_assert_rewrite("emulator_suite")

REPO = Path(__file__).resolve().parent.parent
gc.disable()  # until all tests are collected, which makes little garbage
# Of the many processes that tests start, each would compile TVM's Python code anew, a second of CPU time, where
# containers switch bytecode files off. These lie in a folder of their own.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(REPO / ".pytest_cache" / "bytecode"))
# What Mesa's drivers made of a shader serves all tests, also those with an empty cache of the user's. Mesa makes no
# folder's parents.
SHADERS = REPO / ".pytest_cache" / "mesa"
SHADERS.mkdir(parents=True, exist_ok=True)
os.environ.setdefault("MESA_SHADER_CACHE_DIR", str(SHADERS))
# So do the ISA emulator's compiled operations, which all workers share.
os.environ.setdefault("GFXEMU_OPERATIONS", str(SHADERS.parent / "emulator"))
# Mesa's CPU driver compiles in a quarter less time when it does not optimize, which gains nothing on small kernels.
os.environ.setdefault("GALLIVM_PERF", "nopt")
# A numpy that has threads of its own in each of several workers waits for their cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# And what the compiler makes of kernels.
keep(SHADERS.parent / "code")
# Processes that compile would import TVM once more each; test_kernel_workers.py has them.
kernel_workers.MOST = 1
# Mesa's CPU driver copies for seconds what no cache of a GPU holds.
vulkan_target.COPY_BYTES = 4 << 20
# The files that take longest run first, which leaves short ones for workers that finish early. Of those with
# `lavapipe_model` the first one is long before the others, which find what Mesa made of its shaders.
LONG = (
    "test_emulator_gfx1100.py", "test_vulkan_device.py", "test_architectures.py", "test_selftest.py",
    "test_emulator_gfx1201.py", "test_emulator_gfx942.py", "test_tuning_rpc.py", "test_vulkan_rows.py",
    "test_tensor_device.py", "test_radv.py", "test_encoders.py", "test_tune_cli.py", "test_indexer.py",
    "test_tuning_build.py", "test_interrupts.py", "test_shards.py", "test_staged_device.py", "test_tuning_kit.py",
    "test_measure_devices.py", "test_serve_values.py", "test_image_pieces.py", "test_fuzz_inputs.py",
    "test_vulkan_kernels.py", "test_eight_devices.py", "test_recurrent_kernels.py", "test_drafts.py",
    "test_gemm_lanes.py", "test_deploy.py", "test_cpu_attention.py", "test_tuning_session.py", "test_disk_cache.py",
    "test_gpu_gemm.py", "test_cpu_linear.py", "test_model_cache.py", "test_device_sampling.py",
    "test_image_combinations.py", "test_vulkan_attention_decode.py", "test_vision.py", "test_packed_attention.py",
    "test_deploy_cpu.py", "test_rocm_models.py", "test_steps_ahead.py", "test_operators.py", "test_wheel.py",
    "test_kv_types.py", "test_exchange.py", "test_gpu_gemv.py", "test_unified_memory.py",
    "test_vulkan_attention_matrix.py", "test_scheduler.py", "test_vulkan_attention_coop.py",
    "test_hostile_templates.py", "test_cpu_sample.py", "test_tuning_rooflines.py", "test_cpu_experts.py",
    "test_serve_limits.py", "test_grammars.py", "test_gpu_experts.py", "test_constrained_guesses.py",
    "test_tuning_compile.py", "test_gpu_sample.py", "test_vulkan_coop.py", "test_generic.py",
    "test_tuning_database.py", "test_memory.py", "test_gpu_attention.py", "test_vulkan_matrix.py", "test_windows.py",
    "test_cli.py", "test_engine_many.py", "test_cpu_plans.py", "test_models.py",
)  # fmt: skip


# Those that compile models or many kernels, besides: `make test-fast` leaves all of them out.
SLOW = {
    *LONG, "test_artifact.py", "test_bench_gpu.py", "test_chat.py", "test_constrained_answers.py", "test_cpu_norm.py",
    "test_cpu_rope.py", "test_engine.py", "test_engine_calls.py", "test_gemm_matrix_int8.py", "test_gpu_exchange.py",
    "test_gpu_joint.py", "test_gpu_norm.py", "test_gpu_route.py", "test_hip_ahead.py", "test_image_rows.py",
    "test_inspect_kernels.py", "test_latent.py", "test_manifest.py", "test_measure.py", "test_monitor.py",
    "test_power.py", "test_predictor.py", "test_quality.py", "test_random_weights.py", "test_reference.py",
    "test_repl.py", "test_serve_anthropic.py", "test_serve_calls.py", "test_serve_clients.py",
    "test_serve_conformance.py", "test_serve_events.py", "test_serve_formats.py", "test_serve_harmony.py",
    "test_serve_infill.py", "test_serve_llama.py", "test_serve_ollama.py", "test_serve_openai.py", "test_serve_page.py",
    "test_serve_page_answers.py", "test_serve_ray.py", "test_serve_responses.py", "test_serve_slots.py",
    "test_shared_code.py", "test_speculation.py", "test_spirv_emulator.py", "test_states.py", "test_tuning_search.py",
    "test_vulkan_latent.py", "test_vulkan_models.py", "test_vulkan_validation.py",
}  # fmt: skip


# Files whose tests are of the numbers or the speed of the CPU's kernels have them as users get them, as have all
# processes that tests start.
OPTIMIZED = {
    "test_cpu_attention.py", "test_cpu_experts.py", "test_cpu_linear.py", "test_cpu_norm.py", "test_cpu_plans.py",
    "test_cpu_rope.py", "test_cpu_sample.py", "test_quality.py", "test_tuning_rooflines.py",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def llvm_level(request) -> Iterator[int]:
    """LLVM's level of optimization in this module's tests."""
    if request.path.name in OPTIMIZED:
        yield 3
    else:
        with unoptimized():
            yield 0


def pytest_runtest_setup(item):
    if item.get_closest_marker("emulator") and (why := gfxemu.missing()):
        pytest.skip(why)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in SLOW or item.get_closest_marker("full"):
            item.add_marker("slow")
    place = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look at it again and again, nor after every few hundred
    of the nodes that compilers make."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference models and logits beside the repository; tests that need it skip where it is absent."""
    path = REPO.parent / "shared"
    if not (path / "refs").is_dir():
        pytest.skip("reference data (../shared) is not here")
    return path


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return REPO / "dist" / "demo" / "llama-q4_k_m.gguf"


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make) -> what `make` put at the path that it is given, where a failed attempt may have left something.

    Made once a run, also where pytest-xdist runs several workers: the first that asks makes it, the others wait.
    """
    mine = tmp_path_factory.getbasetemp()  # of a worker: a folder in the run's
    root = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "once"

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        place = root / quote(name, safe="")
        place.mkdir(parents=True, exist_ok=True)
        out, whole = place / "made", place / "whole"
        with open(place / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                make(out)
                whole.touch()
        return out

    return make_once


def only_model(caches: Path) -> Path:
    """The one artifact in a folder of a user's caches."""
    (manifest,) = (caches / "mlc-amd" / "models").glob("*/manifest.json")
    return manifest.parent


@pytest.fixture(scope="session")
def compiled(once):
    """compiled(GGUF path or synthetic spec, ctx) -> artifact folder, for this CPU, in a user's cache that holds nothing
    else.

    Each is compiled once a run at each of LLVM's levels. Not to be changed by tests.
    """

    def compile_once(source: Path | str, ctx: int) -> Path:
        def make(out: Path) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(out))
                model, spec = (str(source), None) if isinstance(source, Path) else (None, source)
                models.artifact_path(LoadOptions(model=model, target="cpu", ctx=ctx), spec)

        return only_model(once(f"{resolve().target}-{source}-{ctx}", make))

    return compile_once


@pytest.fixture(scope="session")
def compiled_for(once):
    """compiled_for(target, arch, source, ctx, kv_type, few) -> artifact folder. source: a GGUF path, a synthetic spec,
    or the arguments of `architectures.tiny`; few: for a GPU, with the functions of few_functions.py only.

    Each is compiled once a run at each of LLVM's levels. Not to be changed by tests.
    """

    def compile_once(
        target: str, arch: str, source: Path | str | tuple, ctx: int, kv_type: str = "f16", few: bool = False
    ) -> Path:
        def make(out: Path) -> None:
            if isinstance(source, tuple):
                opened = architectures.tiny(*source)
            else:
                opened = GGUFModel.open(source) if isinstance(source, Path) else synthetic(source)
            with opened as model, few_functions() if few else nullcontext():
                compile_model(model, out, CompileOptions(target=target, arch=arch, ctx=ctx, kv_type=kv_type))

        level = resolve().target if target == "cpu" else ""
        return once(f"{level}-{target}-{arch}-{source}-{ctx}-{kv_type}{'-few' * few}", make)

    return compile_once


@pytest.fixture(scope="session")
def seeing_files(once) -> Path:
    """A folder with a tiny model that sees: model.gguf, and mmproj.gguf, whose images have 16 rows."""
    return once("seeing files", vision_models.write_pair)


@pytest.fixture(scope="session")
def seeing(once, seeing_files) -> Path:
    """The artifact of these files for this CPU, with a context of 512 tokens."""

    def make(out: Path) -> None:
        with GGUFModel.open(seeing_files / "model.gguf") as model:
            model.add_vision(VisionFile(seeing_files / "mmproj.gguf"))
            compile_model(model, out, CompileOptions(target="cpu", ctx=512, tuned="none"))

    return once(f"{resolve().target}-seeing", make)


@pytest.fixture(scope="session")
def lavapipe_model(compiled_for) -> Path:
    """A tiny model for Mesa's CPU driver, with 128 tokens of context: most tests of the vulkan target run it."""
    return compiled_for("vulkan", "lavapipe", "tiny:q4_0", 128)


@pytest.fixture(scope="session")
def first_chat(once) -> tuple[subprocess.CompletedProcess, Path]:
    """A user's first chat without naming a model, a process that compiles the bundled one; and the folder of the user's
    caches after it."""

    def chat(out: Path) -> None:
        out.mkdir(exist_ok=True)
        command = [
            str(Path(sys.executable).with_name("mlc-amd")),
            "chat",
            "--prompt",
            "What does os.path.join do?",
            "-n",
            "8",
            "--target",  # also on a machine with a GPU
            "cpu",
        ]
        environment = os.environ | {
            "XDG_CACHE_HOME": str(out / "cache"),
            "XDG_STATE_HOME": str(out / "state"),
            "COLUMNS": "100",
        }
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        (out / "process.json").write_text(json.dumps([command, done.returncode, done.stdout, done.stderr]))

    made = once("first chat", chat)
    return subprocess.CompletedProcess(*json.loads((made / "process.json").read_text())), made / "cache"


@pytest.fixture(scope="session")
def demo_artifact(first_chat) -> Path:
    """The bundled model with its whole context, 2048 tokens, as the command compiled it."""
    done, caches = first_chat
    assert done.returncode == 0, done.stderr
    return only_model(caches)


@pytest.fixture(scope="module")
def loaded(demo_artifact) -> Iterator[Engine]:
    """The bundled model on the CPU, as the tests before left it."""
    with Engine.load(demo_artifact) as engine:
        yield engine


@pytest.fixture
def engine(loaded) -> Engine:
    """The same with an empty cache."""
    loaded.reset()
    return loaded


@pytest.fixture(scope="session")
def served(demo_artifact):
    """A server with the bundled model, called "demo"."""
    pytest.importorskip("starlette")
    from servers.serving import serving

    from mlc_amd.tools.server.library import Library

    with serving(Library({"demo": lambda: Engine.load(demo_artifact, RunOptions(threads=2, kv_tokens=8192))})) as found:
        yield found


@pytest.fixture(scope="session")
def emulator():
    """The ISA emulator, run_hsaco; tests that need it skip where it is absent, before they compile anything."""
    if why := gfxemu.missing():
        pytest.skip(why)
    return gfxemu.load()


@pytest.fixture(scope="session")
def linker():
    """What links code objects for AMD GPUs; tests that need it skip where it is absent."""
    try:
        find_linker()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def inspect(capsys):
    """inspect(arguments) -> (stdout, stderr) of a command that succeeds."""

    def run(*tokens):
        capsys.readouterr()  # drops what fixtures printed
        assert cli.main(["inspect", *map(str, tokens)]) == 0
        return capsys.readouterr()

    return run
