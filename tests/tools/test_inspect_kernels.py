"""`mlc-amd inspect` on GPU code: its numbers, with and without a disassembler, for artifacts and for lone files;
damaged files."""

import gzip
import json

import pytest
from few_functions import few_functions

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.codegen.rocm import compile_hsaco, find_linker
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.arch import ARCHS
from mlc_amd.tools import cli
from mlc_amd.tools.inspection import inspect_kernels
from tests.compiler.codegen.test_hsaco import dots

ARCH = "gfx1100"


@pytest.fixture(scope="module", autouse=True)
def linker():
    try:
        find_linker()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def artifact(compiled_for, linker):
    """A tiny model for gfx1100."""
    return compiled_for("rocm", ARCH, "tiny:q4_0", 64, few=True)


@pytest.fixture(scope="module")
def code(artifact):
    return (artifact / f"kernels-{ARCH}.hsaco").read_bytes()


@pytest.fixture
def lone(code, tmp_path):
    """The code object somewhere else, without the assembly."""
    path = tmp_path / "somebody.hsaco"
    path.write_bytes(code)
    return path


@pytest.fixture
def error(capsys):
    """error(arguments) -> the one line of a command that fails."""

    def run(*tokens):
        capsys.readouterr()  # drops what fixtures printed
        assert cli.main(["inspect", *map(str, tokens)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err

    return run


def rows(text, first="VGPRs"):
    """Rows of the table of which the header begins so, by kernel: column title -> cell. Columns are told apart by two
    blanks."""
    lines = iter(text.splitlines())
    header = next(line for line in lines if line.lstrip().startswith(first))
    titles = [title for title in header.split("  ") if title]
    found = {}
    for line in lines:
        if not line:
            break
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        found[cells[-1]] = dict(zip((title.strip() for title in titles), cells, strict=True))
    return found


def test_numbers_of_an_artifact(inspect, artifact, code):
    out, err = inspect(artifact, "--json")
    report = json.loads(out)
    assert err == ""
    (described,) = report["code"]
    assert described["machine"] == ARCH and described["file"] == str(artifact / f"kernels-{ARCH}.hsaco")
    parsed = hsaco.parse(code).kernels
    assembly = gzip.decompress((artifact / f"kernels-{ARCH}.s.gz").read_bytes()).decode()
    launches = json.loads((artifact / "manifest.json").read_text())["launches"][ARCH]
    blocks = {step["symbol"]: step["block"] for kernel in launches.values() for step in kernel["steps"]}
    assert [kernel["name"] for kernel in described["kernels"]] == list(parsed) and set(parsed) == set(blocks)
    for kernel in described["kernels"]:
        expected, (x, y, z) = parsed[kernel["name"]], blocks[kernel["name"]]
        assert {
            key: kernel[key]
            for key in ("vgprs", "sgprs", "agprs", "lds", "scratch", "vgpr_spills", "sgpr_spills", "code")
        } == {
            key: getattr(expected, key)
            for key in ("vgprs", "sgprs", "agprs", "lds", "scratch", "vgpr_spills", "sgpr_spills", "code")
        }
        assert kernel["workgroup"] == x * y * z
        assert tuple(kernel["occupancy"].values()) == hsaco.occupancy(expected, ARCHS[ARCH], x * y * z)
        # counted in the whole text, without taking it apart
        counts = hsaco.instructions(assembly, kernel["name"])
        told = kernel["instructions"]
        assert (told["total"], told["dot"], told["matrix"], told["by_mnemonic"]) == (
            counts.total, counts.dot, counts.matrix, counts.by_mnemonic,
        )  # fmt: skip
        assert told["memory"] == {" ".join(map(str, key)): n for key, n in counts.memory.items()}
        assert told["classes"] == counts.classes and sum(told["classes"].values()) == told["total"]


def test_table_of_an_artifact(inspect, artifact, code):
    out, _ = inspect(artifact, "--kernels")
    table = rows(out)
    for name, kernel in hsaco.parse(code).kernels.items():
        row = table[name.replace("_kernel", "")]
        assert [int(row[title]) for title in ("VGPRs", "SGPRs", "AGPRs", "LDS", "scratch", "code")] == [
            kernel.vgprs, kernel.sgprs, kernel.agprs, kernel.lds, kernel.scratch, kernel.code,
        ]  # fmt: skip
    counts = rows(out, "VALU")
    assert counts.keys() == table.keys() and "static instruction counts" in out
    gemv, gemm = counts["linear_q4_0_256x256_m1"], counts["linear_q4_0_256x256_m64"]
    assert int(gemv["VALU"]) > int(gemv["dot"]) > 0 and gemv["matrix"] == "0" and gemv["LDS loads"] == "0"
    assert int(gemm["matrix"]) > 0 and "x16" in gemm["loads"] and "x16" in gemm["LDS loads"]
    assert "VGPRs" not in (brief := inspect(artifact).out) and "bounds" not in brief
    code_and_bounds = out[out.index("code of gfx1100") :]
    assert max(map(len, code_and_bounds.splitlines())) <= 120


def test_bounds_of_a_linear_layer_by_hand(inspect, artifact):
    """512 x 256 weights of q4_0, 18 bytes for 32, and the norm's: read at 960 GB/s for one row; for 64 rows multiplied
    by 96 compute units that do 512 operations a clock at 2.5 GHz."""
    report = json.loads(inspect(artifact, "--json").out)
    (found,) = report["bounds"]
    assert (found["arch"], found["bandwidth"]) == (ARCH, 960e9)
    known = {row["kernel"]: row for row in found["kernels"]}
    one, many = known["rms_norm_linear_q4_0_512x256_m1"], known["linear_q4_0_512x256_m64"]
    nbytes = 512 * 256 * 18 / 32 + 256 * 4
    assert (one["rows"], one["bytes"], one["operations"]) == (1, nbytes, 2 * 512 * 256)
    assert (one["unit"], one["bound_by"]) == ("dot4", "memory")
    assert one["bound_us"] == pytest.approx(nbytes / 960e9 * 1e6)
    assert (many["rows"], many["unit"], many["bound_by"]) == (64, "matrix16", "matrix16")
    assert many["bound_us"] == pytest.approx(2 * 64 * 512 * 256 / (96 * 512 * 2.5e9) * 1e6)
    lines = [line for line in inspect(artifact, "--kernels").out.splitlines() if line.endswith(f"  {many['kernel']}")]
    assert lines[-1].split()[:2] == [f"{many['bound_us']:.3f}", "matrix16"]
    # what the manifest says multiplies is what the listing has
    for name, kernel in json.loads((artifact / "manifest.json").read_text())["launches"][ARCH].items():
        for step in kernel["steps"]:
            (code,) = (one for one in report["code"][0]["kernels"] if one["name"] == step["symbol"])
            assert step["units"] == code["instructions"]["units"], name


def test_a_synthetic_model_is_compiled_for_its_kernels(inspect, artifact):
    """Without weights, and nothing is left of it; the same kernels as of the artifact."""
    with few_functions():
        out, err = inspect("--synthetic", "tiny:q4_0", "--ctx", "64", "--kernels", "--target", "rocm", "--arch", ARCH)
    of_artifact = inspect(artifact, "--kernels").out
    assert out[out.index("code of") :] == of_artifact[of_artifact.index("code of") :] and "compiling" in err
    shown = inspect("--synthetic", "tiny:q4_0", "--target", "rocm", "--arch", ARCH).out
    assert "file          tiny:q4_0" in out and "Synthetic tiny" in shown and "VGPRs" not in shown


def test_a_file_without_a_disassembler(inspect, error, lone, monkeypatch):
    monkeypatch.setattr(hsaco, "OBJDUMPS", ())
    out, err = inspect(lone, "--kernels")
    assert err.count("\n") == 1 and "no llvm-objdump found" in err and "install LLVM" in err
    row, counts = (rows(out, first)["linear_q4_0_256x256_m1"] for first in ("VGPRs", "VALU"))
    assert {counts[title] for title in counts if title != "kernel"} == {"-"} and "bounds" not in out
    kernels = json.loads(inspect(lone, "--json").out)["code"][0]["kernels"]
    assert all(kernel["instructions"] is None and kernel["workgroup"] is None for kernel in kernels)
    # nothing tells the workgroup's size but the kernel's limit
    assert row["threads"] == "256" and row["waves"] == "16"
    assert "no llvm-objdump found" in error(lone, "--asm", "*")


def test_assembly_that_merely_lies_beside_a_file_is_not_taken(inspect, lone, monkeypatch):
    monkeypatch.setattr(hsaco, "OBJDUMPS", ())
    lone.with_suffix(".s.gz").write_bytes(gzip.compress(b"linear_q4_0_256x256_m1_kernel:\n\ts_endpgm\n"))
    assert json.loads(inspect(lone, "--json").out)["code"][0]["kernels"][0]["instructions"] is None


def test_an_artifact_without_assembly(artifact, code, tmp_path, monkeypatch):
    monkeypatch.setattr(hsaco, "OBJDUMPS", ())
    path = tmp_path / f"kernels-{ARCH}.hsaco"
    path.write_bytes(code)
    assert "compile the model again" in inspect_kernels.GpuCode(path, {"k": 64}).missing
    (tmp_path / "manifest.json").write_text("{}")
    path.with_suffix(".s.gz").write_bytes((artifact / f"kernels-{ARCH}.s.gz").read_bytes()[:-100])
    assert "is damaged" in inspect_kernels.GpuCode(path).missing
    monkeypatch.setattr(inspect_kernels, "_LONGEST", 999)
    path.with_suffix(".s.gz").write_bytes(gzip.compress(bytes(1000)))
    assert "more than 999 bytes of assembly" in inspect_kernels.GpuCode(path).missing


def test_disassembly_tells_what_the_assembly_tells(inspect, tmp_path):
    module = compile_hsaco({"dots": dots(ARCHS["gfx1030"])}, ARCHS["gfx1030"])
    try:
        hsaco.disassemble(module.hsaco)
    except UserError as missing:
        pytest.skip(str(missing))
    path = tmp_path / "dots.co"
    path.write_bytes(module.hsaco)
    (kernel,) = json.loads(inspect(path, "--json").out)["code"][0]["kernels"]
    counts = hsaco.instructions(module.assembly, "dots_kernel")
    assert (kernel["instructions"]["total"], kernel["instructions"]["dot"]) == (
        counts.total,
        counts.dot,
    ) and counts.dot == 16
    assert kernel["instructions"]["memory"]["global load 16"] == 4
    assert inspect(path, "--asm", "dots").out.count("v_dot4") == 16


def test_asm(inspect, error, artifact):
    out, err = inspect(artifact, "--asm", "embed_q4_0_m1")
    assert err == "" and out.startswith(f"; {ARCH}\nembed_q4_0_m1_kernel:\n") and out.rstrip().endswith("s_endpgm")
    assert inspect(artifact, "--asm", "embed_q4_0_m1_kernel").out == out
    assert inspect(artifact, "--asm", "sample*_1").out == inspect(artifact, "--asm", "sample*_kernel_1").out != ""
    several = json.loads(inspect(artifact, "--asm", "embed*", "--json").out)["assembly"][ARCH]
    assert len(several) >= 2 and all(name.startswith("embed") for name in several)
    assert f"; {ARCH}\n{several['embed_q4_0_m1_kernel']}" in out
    assert "no kernel is called 'nothing'" in error(artifact, "--asm", "nothing")


def test_refusals(error, inspect, lone, demo_gguf, compiled):
    assert "--asm" in error(demo_gguf, "--asm", "*")
    for_cpu = compiled("tiny:q4_0", 64)
    assert "has no GPU code" in error(for_cpu, "--asm", "*")
    assert "VGPRs" not in inspect(for_cpu, "--kernels").out
    assert "--plan" in error(lone, "--plan")


def test_what_is_no_code_object(error, lone, code, tmp_path):
    path = tmp_path / "other.hsaco"
    for data in (b"", b"GGUF", b"not a code object", b"__CLANG_OFFLOAD_BUNDLE__" + code, b"\x7fELF\x02" + bytes(100)):
        path.write_bytes(data)
        assert "other.hsaco: not an AMD code object" in error(path, "--kernels")
    path = tmp_path / "a.out"
    path.write_bytes(b"\x7fELF\x02" + bytes(100))
    assert "a.out: not an AMD code object" in error(path)


def test_damaged_code_objects(error, lone, code):
    lone.write_bytes(code[:600])
    assert "somebody.hsaco: damaged AMD code object" in error(lone, "--kernels")
    for size in range(64, len(code), 4999):
        lone.write_bytes(code[:size])
        with pytest.raises(UserError):
            inspect_kernels.GpuCode(lone)
    lone.write_bytes(code.replace(b".wavefront_size", b".wavefront_sizf"))
    assert "damaged AMD code object (KeyError: '.wavefront_size')" in error(lone)
    lone.write_bytes(code.replace(b".wavefront_size\x20", b".wavefront_size\0"))
    assert "damaged AMD code object (ZeroDivisionError: " in error(lone)
