"""The CPU kernels' thread pool (runtime/devices/cpu.c), called as compiled kernels call it."""

import ctypes
import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from mlc_amd.compiler.codegen import cpu


class ThreadGroup(ctypes.Structure):
    _fields_ = (("unused", ctypes.c_void_p), ("tasks", ctypes.c_int32))


JOB = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ThreadGroup), ctypes.c_void_p)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "threads.so"
    cpu.link_shared([], path)
    library = ctypes.CDLL(str(path))
    library.mlc_amd_launch.argtypes = (JOB, ctypes.c_void_p, ctypes.c_int)
    library.mlc_amd_scratch.restype = ctypes.c_void_p
    library.mlc_amd_scratch.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
    library.mlc_amd_free_scratch.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    yield library
    library.mlc_amd_start_threads(1)


def launch(pool, body=lambda task, tasks: 0):
    """Runs body(task, tasks) as a job. Returns (what the launch returned, [(task, tasks, thread) as they came])."""
    calls = []

    def job(task, group, _):
        calls.append((task, group.contents.tasks, threading.get_ident()))
        return body(task, group.contents.tasks) or 0

    return pool.mlc_amd_launch(JOB(job), None, 0), calls


@pytest.mark.parametrize("threads", (1, 2, 3, 8))
def test_every_task_is_done_once(pool, threads):
    assert pool.mlc_amd_start_threads(threads) == threads
    for _ in range(200):
        result, calls = launch(pool)
        tasks = {tasks for _, tasks, _ in calls}
        assert result == 0
        assert len(tasks) == 1
        assert tasks <= {threads * each for each in range(1, 9)}
        assert sorted(task for task, _, _ in calls) == list(range(*tasks))


def test_threads_work_side_by_side(pool):
    pool.mlc_amd_start_threads(3)
    together = threading.Barrier(3, timeout=120)
    for _ in range(5):
        result, calls = launch(pool, lambda task, tasks: (together.wait() if task < 3 else 0) and 0)
        assert result == 0
        assert len({thread for _, _, thread in calls}) == 3


def test_sleeping_threads_wake_up(pool):
    pool.mlc_amd_start_threads(2)
    together = threading.Barrier(2, timeout=120)
    for _ in range(3):
        time.sleep(0.05)
        assert launch(pool, lambda task, tasks: (together.wait() if task < 2 else 0) and 0)[0] == 0


def test_long_jobs_are_shared_out_as_threads_are_free(pool):
    pool.mlc_amd_start_threads(2)
    kept = []  # one job: its address is what its duration is known by
    calls, longest = [], [0.0]  # seconds of task 0: the first launch, shared out evenly, only measures it

    def job(task, group, _):
        calls.append((task, group.contents.tasks, threading.get_ident()))
        end = time.monotonic() + longest[0]
        while task == 0 and len(calls) < 15 and time.monotonic() < end:  # until the others are done
            time.sleep(0.005)
        return 0

    kept.append(JOB(job))
    for longest[0] in (0.2, 120):
        calls.clear()
        assert pool.mlc_amd_launch(kept[0], None, 0) == 0
    assert sorted(task for task, _, _ in calls) == list(range(16))
    slow = next(thread for task, _, thread in calls if task == 0)
    assert sum(thread != slow for _, _, thread in calls) >= 14


def test_others_do_the_task_of_a_thread_that_is_late(pool, tmp_path):
    """Threads that sleep are late for a job this short; it has ended before most of them come."""
    source, made = tmp_path / "job.c", tmp_path / "job.so"
    source.write_text(
        "#include <pthread.h>\nint job(int i, void *g, pthread_t *by) { (void)g; by[i] = pthread_self(); return 0; }\n"
    )
    cpu.compile_c("-shared", "-fPIC", "-pthread", "-o", str(made), str(source))
    job = ctypes.cast(ctypes.CDLL(str(made)).job, JOB)
    pool.mlc_amd_start_threads(8)
    helped = 0
    for _ in range(10):
        time.sleep(0.02)
        by = (ctypes.c_ulong * 64)()
        assert pool.mlc_amd_launch(job, ctypes.addressof(by), 0) == 0
        assert all(by[:8])
        helped += len(set(by[:8])) < 8
    assert helped


def test_a_failed_task_fails_the_launch_only(pool):
    pool.mlc_amd_start_threads(3)
    for bad in range(3):
        assert launch(pool, lambda task, tasks, bad=bad: int(task == bad))[0] == -1
        assert launch(pool)[0] == 0


def test_a_launch_within_a_job_runs_alone(pool):
    pool.mlc_amd_start_threads(2)
    inner = []
    result, _ = launch(pool, lambda task, tasks: inner.append(launch(pool)) or 0)
    assert result == 0
    assert all(result == 0 and [call[:2] for call in calls] == [(0, 1)] for result, calls in inner)


def test_two_callers(pool):
    pool.mlc_amd_start_threads(2)
    wrong = []

    def caller():
        for _ in range(200):
            result, calls = launch(pool)
            if result or sorted(task for task, _, _ in calls) != list(range(calls[0][1])):
                wrong.append(calls)

    callers = [threading.Thread(target=caller) for _ in range(3)]
    for one in callers:
        one.start()
    for one in callers:
        one.join(60)
    assert not wrong


def test_a_forked_process_works_alone(pool):
    pool.mlc_amd_start_threads(3)
    launch(pool)
    pid = os.fork()
    if not pid:
        os._exit(0 if [call[:2] for call in launch(pool)[1]] == [(0, 1)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_scratch_memory(pool):
    def take(nbytes):
        return pool.mlc_amd_scratch(1, 0, nbytes, 2, 32)

    sizes = [1, 1000, 4096, 100_000, 0, *range(1, 20)]
    taken = [take(nbytes) for nbytes in sizes]
    assert all(at % 128 == 0 for at in taken)
    ends = sorted(zip(taken, sizes, strict=True))
    assert all(at + nbytes <= later for (at, nbytes), (later, _) in itertools.pairwise(ends))
    for at, nbytes in zip(taken, sizes, strict=True):
        ctypes.memset(at, 0xA5, nbytes)
    for at in taken:
        pool.mlc_amd_free_scratch(1, 0, at)
    assert take(100_000) in taken  # what was large enough before serves again
    assert not any(map(take, (2**64 - 1, 2**64 - 128, 2**64 - 256, 2**62)))


def test_threads_that_end_free_their_scratch_memory(pool):
    size, page = 16 << 20, os.sysconf("SC_PAGESIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    def body(task, tasks):
        at = pool.mlc_amd_scratch(1, 0, size, 2, 32)
        ctypes.memset(at, 1, size)
        pool.mlc_amd_free_scratch(1, 0, at)

    def use(threads):
        assert pool.mlc_amd_start_threads(threads) == threads
        together = threading.Barrier(threads, timeout=120)
        assert launch(pool, lambda task, tasks: task < threads and together.wait() and body(task, tasks))[0] == 0

    use(2)
    before = resident()
    for _ in range(10):
        use(3)
        use(2)
    assert resident() < before + 10 * size  # of which 20 were taken
