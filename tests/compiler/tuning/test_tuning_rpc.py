"""Tuning on several machines: a tracker and servers as real processes on this machine's loopback, which tune a small
model."""

import functools
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlc_amd.compiler.tuning.database import Database
from mlc_amd.compiler.tuning.session import TuningSession, run
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.measure.candidate import FILE, read, write
from mlc_amd.schedules.space import space

pytest.importorskip("xgboost")
from tvm.rpc import base
from vulkan_harness import gpu  # (lets Vulkan see Mesa's CPU driver only, here and in the servers)

from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.tuning import rpc, rpc_client, rpc_server
from mlc_amd.compiler.tuning.tasks import extract
from mlc_amd.tools.commands import tune_server

MLC_AMD = str(Path(sys.executable).with_name("mlc-amd"))
HOST, KEY = "127.0.0.1", "this-machine"
PATIENCE = 120.0  # seconds for processes to start on a busy machine
TRIALS, BATCH = 4, 2


def wait_for(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


class Loopback:
    """A tracker and servers, each in a process group of its own."""

    def __init__(self, folder: Path):
        try:
            with socket.create_server((HOST, 0)) as free:
                self.port = free.getsockname()[1]
        except OSError as e:
            pytest.skip(f"no sockets here: {e}")
        self.log, self.tracker, self.place = folder / "log", rpc.Tracker((HOST, self.port)), f"{HOST}:{self.port}"
        self.processes = []
        self.processes.append(self._start("--tracker-only", self.place))
        wait_for(lambda: self.servers() is not None)

    def _start(self, *arguments) -> subprocess.Popen:
        # a core for each: threads of several servers that wait for one another would keep each other waiting
        cores = sorted(os.sched_getaffinity(0))
        mine = {cores[len(self.processes) % len(cores)]}
        with open(self.log, "a") as log:
            command = [MLC_AMD, "tune-server", *arguments]
            return subprocess.Popen(
                command, stderr=log, start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, mine)
            )

    def servers(self, key: str = KEY) -> tuple[int, int] | None:
        """(free, all) as the tracker knows; None if it does not answer."""
        try:
            return self.tracker.servers(key)
        except OSError:
            return None

    def serve(self, key: str = KEY) -> subprocess.Popen:
        """Another server, once the tracker has it."""
        free, _ = self.servers(key)
        self.processes.append(self._start("--tracker", self.place, "--key", key))
        wait_for(lambda: self.servers(key)[0] > free)
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            end(process)


def end(process: subprocess.Popen) -> None:
    """Kills a server and its sessions, as a machine that is switched off."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def loopback(tmp_path_factory):
    made = Loopback(tmp_path_factory.mktemp("rpc"))
    made.serve()
    yield made
    made.close()


def recruit(servers: rpc.Servers, count: int) -> None:
    """Connects to that many servers."""

    def enough() -> bool:
        servers.recruit()
        servers._next_event(None)
        return len(servers._idle) >= count

    wait_for(enough)


@functools.cache
def tasks_of(kind: str, arch: str):
    """A small model's tasks with a choice that decode runs, and the arch. For CPUs of a type whose kernels compile
    fast."""
    with synthetic("tiny:f16" if kind == "cpu" else "tiny:q4_0") as model:
        target = make_target(kind, arch)
        found = extract(model, target, 64)
    (arch,) = target.archs
    return [task for task in found if "decode" in task.calls and space(task.workload, arch)], arch


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(rpc, "POLL", 0.1)
    monkeypatch.setattr(rpc_client, "POLL", 0.1)


# ---- the real thing


def test_two_servers_tune_a_model_and_killing_one_loses_nothing(loopback, tmp_path):
    tasks, arch = tasks_of("cpu", "native")
    victim = loopback.serve()
    requested, messages = [], []

    def progress(done, total):
        if (
            done == 1 and total == BATCH
        ):  # in the middle of the first batch: the victim has a candidate, or is just given one
            end(victim)

    with (
        Database(arch, tmp_path) as database,
        rpc.Remote("cpu", arch.name, loopback.place, KEY, say=messages.append) as remote,
    ):

        def measure(jobs):
            requested.extend((workload.key, plan) for workload, plan in jobs)
            return remote.measure(jobs, progress)

        recruit(remote.measurer, 2)
        session = TuningSession(tasks[:2], arch, database)
        run(session, measure, remote.verify, trials=TRIALS, batch=lambda: BATCH)
        records = [record for task in session.tasks for record in database.entry(task.workload).records.values()]
        winners = [database.entry(task.workload).winner for task in session.tasks]
    assert victim.returncode == -signal.SIGKILL
    assert len(requested) == len(set(requested)) == TRIALS == session.trials == len(records)
    assert [(record.error, record.runner) for record in records] == [("", "rpc")] * TRIALS
    assert all(record.seconds > 0 and record.device for record in records)
    assert all(winner.default or (winner.checked == "device" and winner.passed) for winner in winners)
    assert sum("is lost" in text for text in messages) == 1, messages


def test_a_gpu_is_measured_and_verified_there(loopback):
    gpu("llvmpipe")
    tasks, arch = tasks_of("vulkan", "lavapipe")
    jobs = [(tasks[-1].workload, plan) for plan in space(tasks[-1].workload, arch).plans[:3]]
    with rpc.Remote("vulkan", arch.name, loopback.place, KEY) as remote:
        measured = remote.measure(jobs)
        checked = remote.verify(*jobs[-1])
    assert all(
        found.seconds > 0 and found.device.startswith("llvmpipe") and found.runner == "rpc" for found in measured
    )
    assert checked.passed and checked.checked == "lavapipe" and checked.deviation <= 1


def test_servers_are_free_again_after_a_run_that_was_killed(loopback):
    wait_for(lambda: loopback.servers() == (1, 1))
    code = (
        "import sys, time; from mlc_amd.compiler.tuning.rpc import Servers; s = Servers((sys.argv[1], "
        "int(sys.argv[2])), sys.argv[3])\n"
    )
    code += (
        "while len(s._idle) < 1:\n    s.recruit()\n    s._next_event(None)\nprint('ours', flush=True)\ntime.sleep(1000)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, HOST, str(loopback.port), KEY], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ours\n" and loopback.servers() == (0, 1)
    child.kill()
    child.communicate()
    wait_for(lambda: loopback.servers() == (1, 1))


def test_candidates_of_another_arch_are_refused(loopback):
    gpu("llvmpipe")
    tasks, arch = tasks_of("vulkan", "vangogh")
    messages = []
    with (
        rpc.Remote("vulkan", arch.name, loopback.place, KEY, workers=1, wait=1, say=messages.append) as remote,
        pytest.raises(
            rpc.NoServer,
            match=r"no server with key 'this-machine' can do this: .* are for vangogh; this machine has lavapipe",
        ),
    ):
        remote.measure([(tasks[0].workload, space(tasks[0].workload, arch).default)])
    assert sum("is skipped" in text for text in messages) >= 1


def test_a_silent_server_is_lost_and_its_work_is_done_by_another(loopback, monkeypatch):
    tasks, arch = tasks_of("cpu", "native")
    monkeypatch.setattr(rpc, "HOLD", PATIENCE)
    victim, messages = loopback.serve("silent"), []
    first, second = ((tasks[-1].workload, plan) for plan in space(tasks[-1].workload, arch).plans[:2])

    def say(text: str) -> None:
        messages.append(text)
        if "is lost" in text:
            monkeypatch.setattr(rpc_client, "SILENT", PATIENCE)  # the other one may be slow

    with rpc.Remote("cpu", arch.name, loopback.place, "silent", workers=1, say=say) as remote:
        measured = remote.measure([first])
        os.killpg(victim.pid, signal.SIGSTOP)  # as a machine whose network is gone
        loopback.serve("silent")
        monkeypatch.setattr(rpc_client, "SILENT", 1.0)
        measured += remote.measure([second])
    assert [found.error for found in measured] == [""] * 2
    assert [text.partition(": ")[2] for text in messages if "is lost" in text] == ["took more than 1 s"]


# ---- without machines


def test_without_a_server_or_tracker_a_run_says_what_to_do(loopback, monkeypatch):
    messages = []
    monkeypatch.setattr(rpc, "PATIENCE", 0.2)
    with rpc.Servers((HOST, loopback.port), "nobody", wait=1, say=messages.append) as servers:
        with pytest.raises(rpc.NoServer, match=f"tune-server --tracker {loopback.place} --key nobody"):
            servers.compare(Path("a"), Path("b"))
        assert len(messages) == 1 and messages[0].startswith("waiting up to 1 s: no free server with key 'nobody'")
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with (
        rpc.Servers((HOST, port), "nobody", wait=0.1) as servers,
        pytest.raises(rpc.NoServer, match=r"no tracker at .*refused.*tracker-only"),
    ):
        servers.compare(Path("a"), Path("b"))


def test_a_server_waits_for_a_tracker_with_few_words(monkeypatch):
    """One that ends each connection, as a machine on the way does whose other end is dead, and then answers."""
    monkeypatch.setattr(rpc_server, "AGAIN", 0.0)
    monkeypatch.setattr(rpc_server, "REMINDER", math.inf)
    messages: list[str] = []
    with socket.create_server((HOST, 0)) as listening:

        def answer():
            for answers in (False, False, False, True, True):
                with listening.accept()[0] as connection:
                    if answers:
                        connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        place = listening.getsockname()
        rpc_server.wait_for_tracker(place, messages.append).close()
        thread.join()
    first, last = messages
    assert first.startswith(f"the tracker at {HOST}:{place[1]} does not answer (") and last.endswith(" answers")


def test_a_server_that_waits_for_its_tracker_ends_at_ctrl_c():
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [MLC_AMD, "tune-server", "--tracker", f"{HOST}:{port}", "--key", KEY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            assert any("does not answer (Connection refused)" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
        finally:
            end(process)


def test_what_is_no_tracker_ends_a_server():
    with socket.create_server((HOST, 0)) as listening:
        threading.Thread(target=lambda: listening.accept()[0].sendall(b"HTTP/1.1 400"), daemon=True).start()
        with pytest.raises(UserError, match="is not a tracker; check --tracker"):
            rpc_server.wait_for_tracker(listening.getsockname(), print)


def test_a_batch_grows_with_the_servers(loopback):
    wait_for(lambda: loopback.servers() == (1, 1))
    with rpc.Remote("cpu", "native", loopback.place, KEY, workers=1) as remote:
        assert remote.batch() == 8
        remote.measurer.tracker.servers = lambda key: (0, 5)  # all busy
        assert remote.batch() == 40
        remote.measurer.tracker = rpc.Tracker((HOST, 9))  # gone: what was known holds
        assert remote.batch() == 40


def test_what_servers_are_lost_with_is_tried_alone_and_then_given_up():
    results, names = {}, ["reference", "a", "b", "c"]
    work = rpc._Run([rpc._Part("measure", names, frozenset(names))], results.__setitem__)
    part = work.waiting.popleft()
    work.result(part, {"folder": 0, "result": {"error": None}})
    work.result(part, {"folder": 2, "result": {"error": None}})
    work.lost(part, "gone")
    assert sorted(part.folders for part in work.waiting) == [["reference", "a"], ["reference", "c"]]
    for _ in range(rpc.MAX_LOSSES - 1):
        part = next(part for part in work.waiting if "c" in part.folders)
        work.waiting.remove(part)
        work.lost(part, "gone")
    assert [part.folders for part in work.waiting] == [["reference", "a"]]
    assert results["c"]["error"] == "3 servers were lost with it: gone" and set(results) == {"reference", "b", "c"}


def test_candidates_travel_with_what_measuring_takes_only(tmp_path):
    made = []
    for i in range(11):
        folder = tmp_path / f"kernel-{i}"
        folder.mkdir()
        (folder / "kernel.hsaco").write_bytes(bytes([i]))
        (folder / "kernel.s.gz").write_text("; large")
        made.append(write(folder, {"code": "kernel.hsaco", "number": i}).folder)
    folders = rpc_server.unpack(rpc_server.pack(made), tmp_path / "there")
    assert [read(folder).facts["number"] for folder in folders] == list(range(11))
    assert [read(folder).code.read_bytes()[0] for folder in folders] == list(range(11))
    assert sorted(path.name for path in folders[0].iterdir()) == [FILE, "kernel.hsaco"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("deck:9190", ("deck", 9190)),
        ("10.0.0.1", ("10.0.0.1", 9190)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", 9190)),
    ],
)
def test_addresses(text, expected):
    assert rpc_server.address(text) == expected


@pytest.mark.parametrize("text", ["", ":9190", "deck:", "deck:x", "deck:0", "deck:70000", "a..b:1", "\udcff:1"])
def test_wrong_addresses(text):
    with pytest.raises(UserError, match="HOST:PORT"):
        rpc_server.address(text)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, UsageError, "either --tracker"),
        ({"tracker": "a:1", "tracker_only": "b:1"}, UsageError, "either --tracker"),
        ({"tracker": "127.0.0.1:1"}, UsageError, "--key KEY is missing"),
        ({"tracker": "127.0.0.1:1", "key": "a b"}, UserError, "one word"),
        ({"tracker": "no.such.host.invalid", "key": "a"}, UserError, "no.such.host.invalid cannot be reached"),
    ],
)
def test_what_cannot_be_served_is_said(arguments, error, message):
    with pytest.raises(error, match=message):
        tune_server.run(**arguments)
