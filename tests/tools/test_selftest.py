"""`mlc-amd selftest`: what it prints and writes, and that it finds damaged kernels, joins, replays and weights, each by
its name."""

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hip_model import KERNELS, artifact_in
from vulkan_harness import gpu

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.io_names import SLOTS
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.devices.hip.device import HipDevice
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.devices.vulkan.api import DEVICE_LOST, VulkanError
from mlc_amd.runtime.devices.vulkan.io import Io
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.measure import timing
from mlc_amd.runtime.measure.candidate import STEP
from mlc_amd.runtime.measure.inputs import fill
from mlc_amd.runtime.measure.timing import Bench
from mlc_amd.runtime.measure.vulkan import VulkanBackend
from mlc_amd.tools import cli
from mlc_amd.tools.checks import selftest_kernels, selftest_model
from tests.dev.fuzz import resealing
from tests.dev.hip_recorder import Recorder

PROFILE = "lavapipe"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Times of kernels need not be exact."""
    monkeypatch.setattr(timing, "BUSY", 0.0)
    monkeypatch.setattr(timing, "REPEATS", timing.FEWER)


@pytest.fixture(scope="module")
def artifact(lavapipe_model) -> Path:
    gpu("llvmpipe")
    return lavapipe_model


@pytest.fixture
def damaged(artifact, tmp_path):
    """damaged(change(folder, manifest)) -> the artifact with a change, whose checksums are right again."""

    def make(change) -> Artifact:
        copy = shutil.copytree(artifact, tmp_path / "damaged")
        manifest = resealing.content(copy)
        change(copy, manifest)
        resealing.reseal(copy, manifest, interfaces=True)
        return Artifact.open(copy)

    return make


def decoding(artifact: Artifact, names=("decode", "step_8")) -> Artifact:
    """With functions of steps of a token and of a few only, which Mesa's CPU driver runs in less time."""
    functions = artifact.manifest["functions"]
    artifact.manifest["functions"] = {name: functions[name] for name in names}
    return artifact


def wrong(artifact: Artifact, runs: int = 0) -> dict[str, str]:
    found = selftest_kernels.check_all(artifact, PROFILE, None, runs)
    return {one["kernel"]: one["problem"] for one in found if one["problem"]}


def test_passes_and_writes_its_file(compiled_for, tmp_path, monkeypatch, capsys):
    gpu("llvmpipe")
    opened, opens = [], VulkanBackend.__init__
    monkeypatch.setattr(VulkanBackend, "__init__", lambda self, *args: opened.append(args[0]) or opens(self, *args))
    artifact = compiled_for("vulkan", "lavapipe", "tiny:q4_0", 128, few=True)
    out = tmp_path / "found.json"
    assert cli.main(["selftest", str(artifact), "--runs", "2", "--seconds", "0", "-o", str(out)]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert [one["kernel"] for one in found["kernels"]] == [entry["name"] for entry in manifest["kernels"]]
    assert opened == [str(found["device"]["index"])]  # kernels alone run on a GPU of the model's
    assert found["passed"] and found["problems"] == [] and all(entry["name"] in shown for entry in manifest["kernels"])
    assert found["device"]["kind"] == "vulkan" and "Mesa" in found["device"]["driver"]
    joins = [join for one in found["kernels"] for join in one.get("joins", ())]
    assert {join["depth"] for join in joins} >= {0, 70} and len(joins) >= 3
    assert not any(join["failed"] for join in joins)
    steps = {step["function"] for step in found["logits"]["steps"]}
    assert steps == set(manifest["functions"]) == set(found["replays"]["functions"])
    assert found["ahead"] == {"steps": min(selftest_model.AHEAD, manifest["context"] - 4) - 1, "problem": None}
    timed = [one for one in found["kernels"] if "us" in one]
    assert len(timed) > len(manifest["kernels"]) // 2 and all(one["us"] > 0 for one in timed)
    limits = found["device"]["limits"]
    assert limits == {"bandwidth": found["device"]["bandwidth"], "rates": {}} and limits["bandwidth"] > 0
    bounded = [one for one in timed if one["gbps"]]
    assert len(bounded) > 5 and "of bound" in shown
    for one in bounded:
        assert one["bound_by"] == "memory" and one["bound_share"] == pytest.approx(one["bound_us"] / one["us"])
        assert one["bound_share"] == pytest.approx(one["gbps"] * 1e9 / limits["bandwidth"])
    assert ["all", "passed"] in [line.split() for line in shown.splitlines()]


def test_swapped_kernels_are_named(damaged):
    """Two kernels with equal parameters and other code: both are wrong, no other is."""
    names, operators = [], set()

    def swap(folder: Path, manifest: dict) -> None:
        launches = manifest["launches"][PROFILE]
        names.extend([next(name for name in launches if name + "_last" in launches and not name.endswith("_m1"))])
        names.append(names[0] + "_last")
        operators.update(entry["operator"] for entry in manifest["kernels"] if entry["name"] in names)
        first, second = (launches[name]["steps"][0] for name in names)
        first["code"], second["code"] = second["code"], first["code"]
        first["block"], second["block"] = second["block"], first["block"]

    made = damaged(swap)
    assert len(names) == 2
    made.manifest["kernels"] = [entry for entry in made.manifest["kernels"] if entry["operator"] in operators]
    assert set(wrong(made)) == set(names) and len(made.manifest["kernels"]) > 3


def test_a_changed_constant_is_found(damaged):
    """One bit of one constant of one module: the epsilon of a norm becomes a large number."""
    name = "rms_norm_quantize_256_m1"

    def change(folder: Path, manifest: dict) -> None:
        offset, nbytes = manifest["launches"][PROFILE][name]["steps"][0]["code"]
        file = folder / manifest["libraries"][PROFILE]
        code = bytearray(file.read_bytes())
        words = np.frombuffer(code, np.uint32, nbytes // 4, offset)
        entry = next(entry for entry in manifest["kernels"] if entry["name"] == name)
        (bits,) = struct.unpack("<I", struct.pack("<f", entry["args"]["eps"]))
        (place,) = np.flatnonzero(words == bits)
        struct.pack_into("<f", code, offset + 4 * int(place), 8.0)
        file.write_bytes(code)

    made = damaged(change)
    made.manifest["kernels"] = [entry for entry in made.manifest["kernels"] if "norm" in entry["name"]]
    assert list(wrong(made)) == [name] and len(made.manifest["kernels"]) > 2


def test_a_race_is_found(artifact, monkeypatch):
    """One number of one output is another one in the second run."""
    made, get, seen = Artifact.open(artifact), VulkanBackend.get, []

    def racing(self, key, nbytes):
        raw = get(self, key, nbytes)
        if key[1] == "X":  # of the embedding
            seen.append(key)
        return raw[:-1] + b"\1" if key[1] == "X" and len(seen) == 2 else raw

    monkeypatch.setattr(VulkanBackend, "get", racing)
    made.manifest["kernels"] = [entry for entry in made.manifest["kernels"] if entry["name"].startswith("embed")]
    assert "its results differ between 3 runs" in next(iter(wrong(made).values()))


def test_workgroups_that_do_not_meet_are_found(artifact, monkeypatch):
    """A counter that is off before some of the runs."""
    made, count, run = Artifact.open(artifact), [0], VulkanBackend.run

    def sometimes(self, calls):
        count[0] += 1
        if count[0] % 10 == 9:
            for key in self._sizes:
                if key[1] == "Arrived":
                    self.put(key, np.full(self._sizes[key], 1, np.uint8))
        return run(self, calls)

    monkeypatch.setattr(VulkanBackend, "run", sometimes)
    meets = "rope_attention_m1", "attention_rows_m8"
    made.manifest["kernels"] = [entry for entry in made.manifest["kernels"] if entry["name"] in meets]
    problems = wrong(made, runs=12)
    assert problems and all("attention" in name for name in problems)
    assert all("its workgroups do not meet: " in problem for problem in problems.values())


def test_joins_of_a_mixed_step_are_those_of_its_single_rows(artifact, monkeypatch):
    """The chunk's rows, of which there may be many more, do not join anything: they are not even read."""
    made, states, read = Artifact.open(artifact), [], set()
    outputs, get = Bench.outputs, VulkanBackend.get

    def noted(self, index, state, again=False):
        states.append(state)
        return outputs(self, index, state, again)

    def counted(self, key, nbytes):
        read.add((key[1], nbytes))
        return get(self, key, nbytes)

    monkeypatch.setattr(Bench, "outputs", noted)
    monkeypatch.setattr(VulkanBackend, "get", counted)
    (entry,) = (entry for entry in made.manifest["kernels"] if entry["name"] == "attention_mixed_m64")
    m, single = entry["args"]["m"], max(state[2] for state in entry["states"])
    output = next(param for param in entry["params"] if param["role"] == "output")
    made.manifest["kernels"], checked = [entry], len(entry["states"]) * selftest_kernels.TIMES
    (found,) = selftest_kernels.check_all(made, PROFILE, None, 2)
    assert not found["problem"] and not any(join["failed"] for join in found["joins"])
    assert all(state[1:3] == [single, single] for state in states[checked:]) and len(states) > checked
    whole = int(np.prod(output["shape"])) * np.dtype(output["dtype"]).itemsize
    assert {nbytes for name, nbytes in read if name == output["name"]} == {whole, whole * single // m}


def test_stale_replays_are_found(artifact, monkeypatch):
    """Vulkan: what was recorded reads older positions; rocm: a graph that goes wrong after it was verified at load."""
    made = decoding(Artifact.open(artifact), ("decode",))
    device = open_device(made)
    run = device.run

    def stale(function):
        device.write("rows", [(0, 0)])
        run(function)

    monkeypatch.setattr(device, "run", stale)
    assert "decode" in selftest_model.replays(device, made, 1)["wrong"]


def test_steps_ahead_that_miss_their_token_are_found(artifact, monkeypatch):
    with Engine.load(artifact) as engine:
        record = Io.record_inputs
        monkeypatch.setattr(Io, "record_inputs", lambda io, recorder, function, _: record(io, recorder, function, None))
        found = selftest_model.ahead(engine)
        assert found["steps"] > 20 and "other tokens" in found["problem"]


def test_sequences_of_a_large_cache_have_slots_of_their_own(compiled):
    made = Artifact.open(compiled("tiny:q4_0", 2048))
    device = open_device(made, threads=2, kv=KvSize.of(16384, None))
    sequences = selftest_model.Sequences(device, made.manifest)
    assert sequences.short == SLOTS - 1
    for step in sequences.steps(8):
        slots = [single[2] for single in step.singles] + ([step.chunk[2]] if step.chunk else [])
        assert len(set(slots)) == len(slots) and max(slots) < SLOTS


def test_graphs_that_fail_later_are_found(tmp_path):
    made = artifact_in(tmp_path)("gfx1100")
    bindings = Recorder(KERNELS)
    device = HipDevice(made, bindings=bindings)
    assert device.graphs and selftest_model.replays(device, made, 2)["wrong"] == []
    bindings.before_replay = lambda count, arguments: count % 5 > 0
    assert selftest_model.replays(device, made, 2)["wrong"]


def test_other_weights_are_found(artifact, damaged):
    """The device has other weights than the file: logits are wrong, though all kernels are right."""

    def change(folder: Path, manifest: dict) -> None:
        file = folder / "weights.safetensors"
        raw = bytearray(file.read_bytes())
        (header,) = struct.unpack_from("<Q", raw)
        begin, end = json.loads(raw[8 : 8 + header])["blk.0.ffn_down.weight/D"]["data_offsets"]
        raw[8 + header + begin : 8 + header + end] = bytes(end - begin)
        file.write_bytes(raw)

    made = decoding(Artifact.open(artifact))
    device = open_device(made)
    fine, other = (selftest_model.logits(device, decoding(one)) for one in (made, damaged(change)))
    assert fine["problem"] is None and other["problem"].startswith("logits of ")


def test_experts_of_random_weights_need_not_agree(compiled_for, monkeypatch):
    """Rounding changes their choice; other models' functions agree, or it is a problem."""
    with Engine.load(compiled_for("cpu", "native", ("gpt-oss", "mxfp4"), 64)) as engine:
        assert selftest_model.agreement(engine)["deviation"] <= 1
        score = engine.score
        monkeypatch.setattr(engine, "score", lambda ids: score(ids)[::-1])
        found = selftest_model.agreement(engine)
        assert found["problem"] and not found["note"]
        engine.artifact.manifest["weights"] = "random"
        found = selftest_model.agreement(engine)
        assert not found["problem"] and "experts" in found["note"]


def test_on_the_cpu(compiled, capsys):
    assert cli.main(["selftest", str(compiled("tiny:q4_0", 64)), "-t", "2", "--seconds", "0"]) == 0
    shown = capsys.readouterr().out
    assert "none here" in shown and "not run" not in shown


def without(count: int, monkeypatch, note: str) -> None:
    """All kernels but the first `count` get the note instead of their check."""
    check = selftest_kernels.check_all

    def some(*arguments):
        found = list(check(*arguments))
        return found[:count] + [one | {"deviation": None, "problem": None, "note": note} for one in found[count:]]

    monkeypatch.setattr(selftest_kernels, "check_all", some)


@pytest.mark.parametrize(
    ("compared", "note", "code"), [(1, selftest_kernels.NO_TIME, 0), (0, selftest_kernels.NO_REFERENCE, 1)]
)
def test_what_is_not_compared_is_no_success(compiled, capsys, monkeypatch, compared, note, code):
    without(compared, monkeypatch, note)
    assert cli.main(["selftest", str(compiled("tiny:q4_0", 64)), "-t", "2", "--seconds", "0"]) == code
    shown = capsys.readouterr()
    assert ("passed" in shown.out, "no kernel was compared: none has a reference" in shown.err) == (
        not code,
        bool(code),
    )


def test_what_there_is_no_time_for_is_listed(compiled, capsys, tmp_path):
    made, out = compiled("tiny:q4_0", 64), tmp_path / "found.json"
    assert cli.main(["selftest", str(made), "-t", "2", "--seconds", "0.001", "-o", str(out)]) == 1
    (shown, told), found = capsys.readouterr(), json.loads(out.read_text())
    count = len(found["kernels"])
    assert all(one["note"] == "not run (time)" and one["states"] == 0 for one in found["kernels"])
    assert re.search(rf"kernels +0 of {count} ok, {count} not run \(time\)", shown)
    assert not found["passed"] and "FAILED" in shown
    assert told.splitlines()[-1].endswith(
        "no kernel was compared in the time of --seconds 0.001: allow more, or 0 for no limit"
    )
    assert (
        found["replays"]["rounds"] == 1
        and found["replays"]["wrong"] == []
        and not any("us" in one for one in found["kernels"])
    )


def test_each_operator_has_a_kernel_among_the_first(compiled):
    kernels = Artifact.open(compiled("tiny:q4_0", 64)).manifest["kernels"]
    ordered = [entry["operator"] for entry in selftest_kernels.in_turn(kernels)]
    kinds = set(ordered)
    assert set(ordered[: len(kinds)]) == kinds and len(ordered) == len(kernels) > len(kinds)


def test_caches_of_long_contexts_are_small(compiled):
    """Their positions are as deep, and a row's own page is in no other row's sequence."""
    artifact = Artifact.open(compiled("tiny:q4_0", 2048))
    entry = next(entry for entry in artifact.manifest["kernels"] if entry["operator"] == "attention")
    candidate = selftest_kernels.candidate_of(artifact, entry, "")
    (pages,) = (param for param in candidate.params if param.role == "pages")
    held = [param.shape[0] for param in candidate.params if param.role == "cache"]
    deep = max(entry["states"], key=lambda state: state[0])
    assert deep[0] > 2048 - 64 and pages.shape[1] == 32 and max(held) <= selftest_kernels.PAGES + deep[2]
    arrays = fill(candidate, deep, STEP)
    used = arrays["pages"][arrays["rows"][: deep[2], 1]]
    assert used.max() < min(held) and len(np.unique(used)) == max(held)
    results = list(selftest_kernels.check_all(artifact, "", "2", 0))
    assert len(results) == len(artifact.manifest["kernels"]) and not any(one["problem"] for one in results)


def test_a_lost_device_is_named_once(artifact, monkeypatch):
    made, run, count = Artifact.open(artifact), VulkanBackend.run, [0]

    def lost(self, calls):
        count[0] += 1
        if count[0] > 4:
            raise VulkanError("vkQueueSubmit", DEVICE_LOST)
        return run(self, calls)

    monkeypatch.setattr(VulkanBackend, "run", lost)
    found = list(selftest_kernels.check_all(made, PROFILE, None, 0))
    problems = [one["problem"] for one in found if one["problem"]]
    assert problems == ["it does not run: vkQueueSubmit failed: VK_ERROR_DEVICE_LOST"]
    assert sum(one.get("note") == "not run (device lost)" for one in found) > len(found) // 2


def test_a_device_that_hangs_ends_the_process():
    program = (
        "import time\n"
        "from mlc_amd.tools.checks import selftest_limits\n"
        "from mlc_amd.tools.terminal import terminal\n"
        "watch = selftest_limits.Watch('a GPU', terminal.Status(), 0.2)\n"
        "with watch.over('kernel one'): pass\n"
        "with watch.over('kernel two'): time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: a GPU does not answer: kernel two ")


def test_a_wrong_kernel_fails_the_command(compiled, capsys, tmp_path):
    """The manifest states another epsilon than the code has."""
    made, out = shutil.copytree(compiled("tiny:q4_0", 64), tmp_path / "model"), tmp_path / "found.json"
    manifest = resealing.content(made)
    entry = next(entry for entry in manifest["kernels"] if "eps" in entry["args"])
    entry["args"]["eps"] = 8.0
    resealing.reseal(made, manifest, interfaces=True)
    assert cli.main(["selftest", str(made), "-t", "2", "--seconds", "0", "-o", str(out)]) == 1
    shown, found = capsys.readouterr(), json.loads(out.read_text())
    assert shown.err.splitlines()[-1].startswith("error: ") and entry["name"] in shown.err
    assert {line.split()[0] for line in shown.out.splitlines() if "WRONG" in line} == {entry["name"]}
    assert not found["passed"] and [one["kernel"] for one in found["kernels"] if one["problem"]] == [entry["name"]]


def test_refused_flags(artifact, capsys):
    assert cli.main(["selftest", str(artifact), "--runs", "-1"]) == 2
    assert cli.main(["selftest", str(artifact), "--seconds", "-1"]) == 2
    assert cli.main(["selftest", str(artifact), "-o", "/nowhere/found.json"]) == 1
    assert "no such folder" in capsys.readouterr().err
