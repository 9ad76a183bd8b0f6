"""`mlc-amd tune` as a user runs it: errors in one line, tables, a run that is stopped and goes on, what compile makes
of the results."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import vision_models
from formula import Bench

from mlc_amd.compiler.tuning import build, summary
from mlc_amd.compiler.tuning.database import Checked, Measured
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import TargetOptions
from mlc_amd.tools import cli
from mlc_amd.tools.commands import tune
from mlc_amd.tools.measure import tune_report

pytest.importorskip("xgboost")
SPEC = ("--synthetic", "tiny:q8_0", "--ctx", "64")
QUICK = ("--synthetic", "tiny:f16", "--ctx", "64")  # its kernels compile in a third of the time
LOG = "measurements.jsonl"
SUBJECT = functools.cache(tune.Subject.of)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlc-amd"


@pytest.fixture
def one_worker(monkeypatch):
    """Each that builds takes seconds to start, and little is built here."""
    monkeypatch.setattr(build, "available_threads", lambda: 1)


@pytest.fixture(autouse=True)
def subjects(monkeypatch):
    """Tests that tune the same model for the same GPU list its kernels once."""
    monkeypatch.setattr(tune.Subject, "of", SUBJECT)


@pytest.fixture
def command(cache, capsys, one_worker):
    """command(arguments of `tune`) -> (stdout, stderr) of one that succeeds."""

    def run(*tokens):
        assert cli.main(["tune", *map(str, tokens)]) == 0
        return capsys.readouterr()

    return run


def measurements(cache: Path) -> list[tuple[str, str]]:
    """(workload, plan) of each line of the log that is a measurement."""
    lines = [json.loads(line) for path in cache.glob(f"tuned/*/{LOG}") for line in path.read_text().splitlines()]
    return [(json.dumps([line["op"], line["args"]]), json.dumps(line["plan"])) for line in lines if "seconds" in line]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (("nothing.gguf",), "no such file"),
        (("--synthetic", "llama9:q4_0"), "unknown preset"),
        (("--synthetic", "tiny:q9"), "unknown format"),
        ((*SPEC, "--target", "npu"), "--target must be"),
        ((*SPEC, "--target", "rocm", "--arch", "gfx1"), "unknown AMD GPU"),
        ((*SPEC, "--target", "vulkan", "--arch", "voodoo"), "unknown Vulkan profile"),
        ((*SPEC, "--target", "rocm", "--arch", "gfx1100,gfx1101", "--list"), "one of them at a time"),
        ((*SPEC, "--target", "cpu", "--gpus", "2", "--list"), "only GPUs share a model"),
        ((*SPEC, "--arch", "i386sx"), "unknown CPU arch"),
        ((*SPEC, "--device", "all"), "number of threads"),
        ((*SPEC, "--runner", "cloud"), "--runner must be local or rpc"),
        ((*SPEC, "--runner", "rpc"), "needs --tracker"),
        ((*SPEC, "--tracker", "a:1"), "--runner rpc"),
        ((*SPEC, "--budget", "soon"), "--budget 'soon' is not a time"),
        ((*SPEC, "--budget", "0s"), "--budget '0s' is not a time"),
        ((*SPEC, "--trials", "0"), "--trials is 0"),
        ((*SPEC, "--seed", "0"), "--seed of tune must be at least 1"),
        ((*SPEC, "-o", "plot.svg"), "for --report"),
        ((*SPEC, "--report", "-o", "plot.doc"), "must end with"),
        ((*SPEC, "--export-kit", "kit"), "holds no TVM"),
        (("--import-kit", "nothing"), "kit"),
        (("model.gguf", "--synthetic", "tiny:q8_0"), "not both"),
    ],
)
def test_errors_are_one_line(cache, capsys, monkeypatch, tmp_path, tokens, text):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *tokens]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and text in err
    assert not measurements(cache)


def test_an_artifact_is_no_model_to_tune(compiled, cache, capsys):
    assert cli.main(["tune", str(compiled("tiny:q4_0", 64))]) == 1
    assert "GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "text"),
    [((), "nothing.json does not start"), (("--runner", "rpc", "--tracker", "127.0.0.1:9"), "127.0.0.1:9")],
)
def test_without_a_device_or_a_tracker(cache, capsys, monkeypatch, one_worker, tokens, text):
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(name, "/nothing.json")
    assert cli.main(["tune", *SPEC, "--target", "vulkan", "--arch", "vangogh", *tokens, "--trials", "2"]) == 1
    found = capsys.readouterr().err.splitlines()[-1]
    assert found.startswith("error: ") and text in found and not measurements(cache)


@pytest.mark.parametrize(
    ("budget", "trials", "expected"),
    [
        (None, None, 600),
        (None, 7, None),
        ("90s", None, 90),
        ("90", None, 90),
        ("1h30m", 5, 5400),
        (" 10M ", None, 600),
        ("1.5s", None, 1.5),
    ],
)
def test_budgets(budget, trials, expected):
    assert tune.time_limit(budget, trials) == expected


def test_the_list_tells_calls_and_shares(command):
    out, _ = command(*SPEC, "--target", "rocm", "--arch", "gfx1100", "--list")
    header, *lines = out.splitlines()[1:-1]
    assert header.split()[:3] == ["kernel", "per", "step"]
    shares = [float(cell[:-1]) for line in lines for cell in line.split() if cell.endswith("%")]
    assert (
        len(shares) == len(lines)
        and abs(sum(shares) - 100) < 0.1 * len(lines)
        and shares == sorted(shares, reverse=True)
    )
    gate_up = next(line for line in lines if "gate_up" in line and "_m1 " in line)
    assert gate_up.split()[1] == "2"  # layers


def test_kernels_of_one_of_several_gpus(command):
    """Half of the columns of a layer's products."""
    out, _ = command(*SPEC, "--target", "rocm", "--arch", "gfx1100", "--gpus", "2", "--list")
    assert "linear_q8_0_256x384_m1 " in out and "linear_q8_0_256x768_m1 " not in out


def test_kernels_of_an_image_encoder(command, tmp_path):
    vision_models.write_pair(tmp_path / "files")
    files = [tmp_path / "files" / name for name in ("model.gguf", "mmproj.gguf")]
    out, _ = command(files[0], "--mmproj", files[1], "--target", "vulkan", "--arch", "rdna3", "--ctx", "64", "--list")
    attention = next(line for line in out.splitlines() if line.startswith("packed_attention"))
    assert attention.split()[1] == str(vision_models.LAYERS)


def test_a_run_goes_on_and_compile_uses_it(command, cache, capsys, monkeypatch, tmp_path):
    """A few of the model's tasks are enough."""
    whole = SUBJECT(None, QUICK[1], TargetOptions(target="cpu", ctx=64), None)
    chosen = [task for task in whole.tasks if "decode" in task.calls and task.workload.name == "linear"][:2]
    monkeypatch.setattr(tune.Subject, "of", lambda *args: replace(whole, tasks=chosen))
    tokens = (*QUICK, "--target", "cpu")
    out, err = command(*tokens, "--trials", 2)
    told = [line for line in err.splitlines() if "other programs had" not in line]  # as on a busy machine
    assert out.count("\n") == 1 and "2 plans measured" in out and len(told) <= 2
    assert "2 plans measured, 0 wrong; 4 so far" in command(*tokens, "--trials", 2).out
    found = measurements(cache)
    assert len(found) == len(set(found)) == 4
    table = command(*tokens, "--report").out
    rows = [
        line for line in table.splitlines() if line.startswith(("linear", "gate_up", "attention", "rms_norm", "embed"))
    ]
    counts = [re.search(r" (\d+)/\d+ ", line) for line in rows]
    assert rows and sum(int(count[1]) for count in counts) == 4
    artifact = tmp_path / "artifact"
    assert cli.main(["compile", *map(str, tokens), "--tuned", "user", "-o", str(artifact)]) == 0
    plans = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("plans"))
    kernels = json.loads((artifact / "manifest.json").read_text())["kernels"]
    origins = [origin["from"] for kernel in kernels for origin in kernel["tuned"].values()]
    assert f"{origins.count('default')} default" in plans and set(origins) <= {"default", "user"}
    assert cli.main(["inspect", str(artifact), "--kernels"]) == 0
    assert capsys.readouterr().out.count("user: ") == origins.count("user")


class Formula(Bench):
    """Measures by a formula, and has no device that verifies. error: of all measurements, if they fail."""

    def __init__(self, error: str = ""):
        super().__init__()
        self.error = error

    def measure(self, jobs, progress):
        return [Measured(None, self.error) for _ in jobs] if self.error else self(jobs)

    def verify(self, workload, plan):
        return Checked("", False, error="there is no GPU here")

    def batch(self):
        return 8

    def close(self):
        """Nothing is open."""


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        (("--budget", "0.000000001s"), "", "nothing was measured: give a longer --budget"),
        (("--trials", "3"), "the driver\ncrashed", "no plan could be measured: the driver crashed"),
    ],
)
def test_nothing_measured_is_no_success(cache, capsys, monkeypatch, tokens, error, text):
    monkeypatch.setattr(tune, "_runner", lambda *args: Formula(error))
    assert cli.main(["tune", *SPEC, "--target", "rocm", "--arch", "gfx1100", *tokens]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {text}"


def test_what_could_not_be_verified_is_said_and_not_called_wrong(command, cache, monkeypatch):
    """As where nothing can run the kernels of a GPU. A few of the model's tasks are enough."""
    whole = SUBJECT(None, SPEC[1], TargetOptions(target="rocm", arch="gfx1100", ctx=64), None)
    linears = [task for task in whole.tasks if task.workload.name == "linear" and task.workload.m == 64][:4]
    monkeypatch.setattr(tune.Subject, "of", lambda *args: replace(whole, tasks=linears))
    monkeypatch.setattr(tune, "_runner", lambda *args: Formula())
    out, _ = command(*SPEC, "--target", "rocm", "--arch", "gfx1100", "--trials", 12)
    text = r"12 plans measured, 0 wrong, (\d+) could not be verified \(there is no GPU here\); 12 so far, \d+ failed"
    found = re.search(text, out)
    assert found and int(found[1]) > 0 and out.count("\n") == 1, out


def test_ctrl_c_keeps_what_was_measured(cache):
    # one thread: on a busy machine, threads wait minutes for others that do not run
    program = [str(Path(sys.executable).with_name("mlc-amd")), "tune", *QUICK, "--target", "cpu", "--device", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen([*program, "--budget", "10m"], env=os.environ, text=True, **pipes)
    end = time.monotonic() + 240
    while not measurements(cache):
        assert running.poll() is None and time.monotonic() < end, running.communicate()
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=240)
    assert running.returncode == 130
    assert "run it again to continue" in err and "Traceback" not in err and "plans measured" in out
    assert measurements(cache)


# ---- tables and plots, on records made by hand


def subject() -> tune.Subject:
    return SUBJECT(None, "tiny:q8_0", TargetOptions(target="vulkan", arch="vangogh", ctx=64), None)


@pytest.fixture
def recorded(cache) -> tune.Subject:
    """A subject of which one task has a default of 100 us, a wrong plan of 10, a right one of 50 us, one that failed,
    one that was not verified."""
    from mlc_amd.compiler.tuning.database import Checked, Database, Measured
    from mlc_amd.compiler.tuning.session import TuningSession

    found = subject()
    with Database(found.arch) as database:
        session = TuningSession(found.tasks, found.arch, database)
        task = session.tasks[0]
        plans = session.space(task).plans
        for plan, seconds in zip(plans, (100e-6, 10e-6, 50e-6, None, 20e-6), strict=False):
            session.report(
                task, plan, Measured(seconds, "" if seconds else "it crashed", runner="local", device="a GPU")
            )
        session.check(task, plans[1], Checked("device", False))
        session.check(task, plans[2], Checked("device", True))
    return found


def test_rows_take_the_best_right_plan(recorded):
    rows = [row for row in recorded.rows() if row.history]
    assert len(rows) == 1 and len(rows[0].history) == 5 and rows[0].failed == 2
    assert (rows[0].default, rows[0].best) == (100e-6, 50e-6)
    assert rows[0].roofline > 0 and "(2.00x)" in summary.gain(rows) and "1 of 1 kernels" in summary.gain(rows)
    table = tune_report.table(recorded.shape, rows)
    assert "2.00x" in table and "a GPU (local)" in table and "5/" in table
    numbers, times, bests = summary.progress(rows[0].history)
    assert (
        numbers == [1, 2, 3, 5]
        and times == pytest.approx([100, 10, 50, 20])
        and bests == pytest.approx([100, 100, 50, 20])
    )


def test_a_report_without_measurements(cache):
    assert "nothing was measured" in tune_report.table(subject().shape, subject().rows())


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot(recorded, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot{suffix}"
    tune_report.plot(recorded.shape, recorded.rows(), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in data
    with pytest.raises(UserError, match="nothing was measured"):
        tune_report.plot(recorded.shape, [row._replace(history=[]) for row in recorded.rows()], path)
