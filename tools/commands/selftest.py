"""`mlc-amd selftest`: tests whether this machine's device computes correct results, and how fast: every kernel of a
model, the launches of its functions, the whole model. Needs no compiler, so it also runs in bundles.

Its parts are selftest_kernels.py and selftest_model.py, with limits in selftest_limits.py. dist/README.md describes the
file that -o writes.
"""

import json
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import mlc_amd
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import MANY, LoadOptions, Option
from mlc_amd.tools.checks import machine, selftest_kernels, selftest_model
from mlc_amd.tools.checks.selftest_limits import Budget, Watch
from mlc_amd.tools.hub import models
from mlc_amd.tools.measure import bandwidth, bounds
from mlc_amd.tools.options import Without
from mlc_amd.tools.terminal import display, terminal

SHORT = {"o": "output"}
FORMAT = 1  # version of the file's format
# How often each function is replayed, and how often it is timed, by the type of device. Mesa's CPU driver needs seconds
# for a prompt.
ROUNDS = {"cpu": (1, 1)}
GPU_ROUNDS = (20, 7)
_NOTES = {  # texts in the summary that follow a number of kernels
    selftest_kernels.NO_REFERENCE: "without a reference",
    selftest_kernels.NO_TIME: "not run (time): more with --seconds",
    selftest_kernels.NO_DEVICE: "not run (device lost)",
}


def run(
    *,
    output: str | None = None,
    runs: Annotated[int, Option(
        "how often each kernel runs whose workgroups wait for one another, at each of several depths; 0 skips this",
        low=0, high=MANY)] = 1000,
    seconds: Annotated[float, Option(
        "about how long the test may take; kernels that there is no time for are listed as not run; 0: no limit",
        unit="seconds", low=0, high=MANY)] = 60,
    whole_model: bool = False,
    load: Annotated[LoadOptions, Without(
        "tuned", "verify", "n_cpu_moe", "kv_tokens", "kv_memory", "cache_disk", "draft")],
) -> None:  # fmt: skip
    """Compares every kernel of a model on this machine's device with reference results, and prints what is wrong, what
    is fast and what is slow. Exits with 1 if anything is wrong, or if no kernel was compared.

    Each kernel runs alone, on made-up inputs. Then the launches of each function, as they are replayed for every
    token, are compared with launches one by one, and the model's logits with reference ones. No compiler is needed for
    a compiled model.

    Args:
        output: a file for the results, the machine and its drivers, as JSON: what a report should contain.
        whole_model: compare the logits also of a large model, which takes minutes more.
    """
    out = Path(output).expanduser() if output else None
    if out and not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder for --output")
    engine = models.load_any(load)
    display.message(f"on {engine.device.name}")
    found = measure(engine, runs, whole_model, seconds)
    print(text(found), end="")
    if out:
        temporary = out.with_name(f".{out.name}.tmp")
        temporary.write_text(json.dumps(found, indent=1) + "\n")
        temporary.replace(out)
        display.message(f"wrote {out}")
    if problems := found["problems"]:
        more = f" (and {len(problems) - 1} more, see above)" if len(problems) > 1 else ""
        raise UserError(f"{engine.device.name} does not pass: {problems[0]}{more}")


def measure(engine: Engine | Encoder, runs: int, whole_model: bool, seconds: float) -> dict:
    """The content of the file. Closes the engine. With several GPUs, the first one runs the kernels alone."""
    artifact, used, budget = engine.artifact, engine.device, Budget(seconds)
    facts = about_device(used)
    replayed, timed = ROUNDS.get(facts["type"], GPU_ROUNDS)
    status = terminal.Status()
    watch = Watch(used.name, status, None) if facts["type"] == "cpu" else Watch(used.name, status)
    watch.calls(used, ("run", "run_plain", "time", "wait"))
    status.show("whole model")
    measured = bandwidth.of_device(used)
    limits = bounds.limits_on(used, artifact.manifest, measured and measured[0])
    if isinstance(engine, Encoder):
        found = selftest_model.of_encoder(engine, replayed)
    else:
        found = {"agreement": selftest_model.agreement(engine)}
        token = selftest_model.pace(engine)  # the weights are in memory now
        found |= {
            "ahead": selftest_model.ahead(engine, token, budget),
            # first, because drivers may have additional work for what runs first
            "times": selftest_model.times(engine, limits, timed, token, budget),
            # From here on, the device's pages do not belong to the engine any more.
            "replays": selftest_model.replays(used, artifact, replayed, token, budget),
            "logits": selftest_model.logits(used, artifact, whole_model),
        }
    where = bounds.code_arch(used, artifact.manifest)
    engine.close()  # the kernels need its memory
    asked = str(facts["threads" if used.kind == "cpu" else "index"])
    count, kernels = len(artifact.manifest["kernels"]), []

    def doing(name: str) -> None:
        status.show(f"kernel {len(kernels) + 1} of {count}: {name}")

    for result in selftest_kernels.check_all(artifact, where, asked, runs, doing, budget, watch):
        kernels.append(result | found["times"].get(result["kernel"], {}))
    status.clear()
    order = {entry["name"]: i for i, entry in enumerate(artifact.manifest["kernels"])}
    kernels.sort(key=lambda kernel: order[kernel["kernel"]])
    problems = [f"{kernel['kernel']}: {kernel['problem']}" for kernel in kernels if kernel["problem"]]
    problems += [f"replays of {name} differ from launches one by one" for name in found["replays"]["wrong"]]
    problems += _nothing_compared(kernels, seconds)
    checked = found["logits"], found["agreement"], found["ahead"]
    problems += [part["problem"] for part in checked if part["problem"]]
    manifest = artifact.manifest
    facts |= {"bandwidth": measured and measured[0], "bandwidth_how": measured and measured[1]}
    return {
        "format": FORMAT,
        "made_by": f"mlc-amd {mlc_amd.__version__}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "passed": not problems,
        "problems": problems,
        "device": facts | {"limits": limits._asdict()},
        "machine": about_machine(),
        "model": {
            "name": manifest["name"],
            "target": manifest["target"]["kind"],
            "arch": where,
            "context": manifest["context"],
            "formats": {name: entry["tensors"] for name, entry in manifest["formats"].items()},
            "weights": manifest["weights"],
        },
        "kernels": kernels,
        **{name: found[name] for name in ("replays", "logits", "agreement", "ahead")},
    }


def _nothing_compared(kernels: list[dict], seconds: float) -> list[str]:
    """A line if no kernel was compared: that must not count as success."""
    notes = {kernel.get("note") for kernel in kernels}
    if selftest_kernels.NO_TIME in notes and None not in notes:
        return [f"no kernel was compared in the time of --seconds {seconds:g}: allow more, or 0 for no limit"]
    return ["no kernel was compared: none has a reference"] if None not in notes else []


def about_device(device) -> dict:
    """The device that was used: name, kind, type, and its driver."""
    if hasattr(device, "stages"):  # several GPUs
        stages = [about_device(one) for one in device.stages]
        return stages[0] | {"name": device.name, "stages": stages}
    facts = {"name": device.name, "kind": device.kind, "type": "cpu" if device.kind == "cpu" else "gpu"}
    if device.kind == "vulkan":
        gpu = device.gpu
        number = f"0x{gpu.driver_version:08x}"
        facts |= {"type": gpu.type, "driver": gpu.driver, "driver_version": number, "index": gpu.index}
        facts |= {"vendor": f"0x{gpu.vendor:04x}", "id": f"0x{gpu.device:04x}", "subgroup": list(gpu.subgroup)}
    elif device.kind == "rocm":
        facts |= {"driver": f"HIP {'.'.join(map(str, device.version))}", "graphs": device.graphs}
        facts |= {"index": device.gpu.index, "pci": device.gpu.pci, "host_memory": device.memory.host_memory}
    else:
        facts |= {"driver": "threads", "threads": device.threads}
    return facts


def about_machine() -> dict:
    """The system, its CPU, and its AMD GPUs with their clocks and firmware."""
    release = platform.uname()
    return {
        "system": f"{release.system} {release.release} {release.machine}",
        "distribution": machine.distribution(),
        "python": platform.python_version(),
        "cpu": machine.cpu(),
        "amdgpu": machine.amd_cards(),
    }


# ---- output


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def text(found: dict) -> str:
    """The results as tables."""
    header = ("kernel", "result", "deviation", "runs", "us", "GB/s", "TFLOP/s", "of bound")
    forms = {"us": ".1f", "gbps": ".1f", "tops": ".3f", "bound_share": ".0%"}
    rows = []
    for kernel in found["kernels"]:
        verdict = "WRONG" if kernel["problem"] else kernel.get("note") or "ok"
        runs = sum(join["runs"] for join in kernel.get("joins", ())) or kernel["states"] or ""
        speed = (_number(kernel.get(key), form) for key, form in forms.items())
        rows.append((kernel["kernel"], verdict, _number(kernel["deviation"], ".0%"), runs, *speed))
    lines = [display.table(header, rows, range(2, 8)), ""]
    lines += [f"{'':2}{problem}\n" for problem in found["problems"]] + ["\n"] * bool(found["problems"])
    return "".join(lines) + display.table(("check", "result"), _checks(found))


def _checks(found: dict) -> list[tuple[str, str]]:
    """A line for each of the other results: (label, text)."""
    replays, logits, agreement, ahead = (found[name] for name in ("replays", "logits", "agreement", "ahead"))
    good = sum(not kernel["problem"] and not kernel.get("note") for kernel in found["kernels"])
    notes = Counter(kernel["note"] for kernel in found["kernels"] if kernel.get("note"))
    joins = [join for kernel in found["kernels"] for join in kernel.get("joins", ())]
    worst = max((step["deviation"] or 0 for step in logits["steps"]), default=None)
    counts = [f"{good} of {len(found['kernels'])} ok", *(f"{n} {_NOTES[note]}" for note, n in notes.items())]
    met = f"{sum(join['runs'] for join in joins)} runs, {sum(join['failed'] for join in joins)} wrong"
    replayed = f"ok, {replays['rounds']} rounds of {len(replays['functions'])} functions"
    share = "ok, {} of what may differ".format
    left = notes[selftest_kernels.NO_TIME]
    passed = f"passed, without {left} kernels that were not run" if left else "passed"
    verdicts = [
        ("kernels", ", ".join(counts)),
        ("workgroups that meet", met if joins else "none here"),
        ("replays", f"WRONG: {', '.join(replays['wrong'])}" if replays["wrong"] else replayed),
        ("steps ahead", ahead["problem"] or (f"ok, {ahead['steps']} steps" if ahead["steps"] else "none here")),
        ("logits", logits["problem"] or logits["note"] or share(_number(worst, ".0%"))),
        ("functions agree", agreement["problem"] or agreement["note"] or share(_number(agreement["deviation"], ".0%"))),
        ("device", f"{found['device']['name']}, {found['device']['driver']}"),
        ("all", passed if found["passed"] else "FAILED"),
    ]
    for card in found["machine"]["amdgpu"]:
        told = (f"{name} {clock['now']} of {max(clock['levels'])} MHz" for name, clock in card["clocks"].items())
        clocks = ", ".join(told)
        verdicts.insert(-1, (card["card"], f"{card['id']}, {clocks}, {len(card['firmware'])} firmware versions"))
    return verdicts
