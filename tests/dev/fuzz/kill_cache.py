"""Processes that answer with a cache on disk are killed at random moments; each checks its answers.

    python -m tests.dev.fuzz.kill_cache ARTIFACT --count 1000

In: an artifact for this CPU. Each process loads it with the same folder, answers prompts with common beginnings in a
random order, and compares the tokens to those of an engine without a disk; the parent kills it after a random time. In
the end all files must be whole records, or temporary. Out: a line with what was seen; exit status 1 for a wrong answer,
an error, or a hang.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np

PROMPTS, TOKENS, LONGEST = 12, 12, 700
LIMIT = 24 << 20  # bytes on disk: less than all prompts need
HANG = 120.0  # seconds


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    common = [draw.randrange(1000) for _ in range(LONGEST)]
    return [common[: 60 * i] + [draw.randrange(1000) for _ in range(draw.randrange(20, 300))] for i in range(PROMPTS)]


def answers(artifact: Path, order: list[int], disk: int | None, say: int) -> None:
    """Writes a line for each answer to the file `say`: its number, the tokens that were cached, those generated."""
    from mlc_amd.runtime.engine.engine import Engine
    from mlc_amd.runtime.options import RunOptions

    known = prompts()
    with Engine.load(artifact, RunOptions(threads=1, cache_disk=disk)) as engine:
        os.write(say, b"loaded\n")
        for number in order:
            found = [piece.id for piece in engine.generate(known[number], max_tokens=TOKENS, temperature=0.0)]
            os.write(say, f"{number} {engine.last.cached_tokens} {found}\n".encode())
    os.write(say, b"closed\n")


def child(artifact: Path, order: list[int], disk: int | None, life: float | None) -> list[str]:
    """What a process says that is killed so many seconds after it has loaded the model."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        status = 1
        try:
            os.close(reading)
            answers(artifact, order, disk, writing)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        first = said.readline().decode()
        if life is not None:
            time.sleep(life)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        begun, ended = time.monotonic(), False
        while not ended:
            ended = os.waitpid(process, os.WNOHANG)[0] != 0
            if time.monotonic() - begun > HANG:
                os.kill(process, signal.SIGKILL)
                raise SystemExit(f"a process hangs: {order}")
            time.sleep(0 if ended else 0.002)
        return [first.strip(), *said.read().decode().split("\n")[:-1]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--count", type=int, default=1000, help="of processes that are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--life", type=float, default=0.5, help="seconds, at most")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    import mlc_amd.runtime.devices.cpu  # processes are forked with what they need
    import mlc_amd.runtime.engine.engine  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        expected = [line.split(" ", 2)[2] for line in child(arguments.artifact, [*range(PROMPTS)], None, None)[1:-1]]
        seen = wrong = cached = killed = 0
        number = 0
        while killed < arguments.count:
            number += 1
            order = [draw.randrange(PROMPTS) for _ in range(6)]
            said = child(arguments.artifact, order, LIMIT, draw.uniform(0, arguments.life))
            killed += said[-1] != "closed"
            for line in said[1:]:
                if line == "closed":
                    continue
                which, hit, tokens = line.split(" ", 2)
                seen, cached = seen + 1, cached + int(hit)
                if tokens != expected[int(which)]:
                    wrong += 1
                    print(f"process {number}: prompt {which} after {order}: {tokens}, not {expected[int(which)]}")
        damaged, whole = check()
        print(
            f"{killed} of {number} processes killed, the others ended before; {seen} answers, {wrong} of them wrong, "
            f"{cached} tokens from the cache; {whole} whole files, {damaged} damaged ones"
        )
        return int(bool(wrong or damaged))


def check() -> tuple[int, int]:
    """Numbers of files that are no records, and of those that are."""
    from mlc_amd.runtime.cache.page_files import HEADER, PageFiles, folders

    damaged = whole = 0
    for folder in folders():
        files = PageFiles(bytes.fromhex(folder.name), {}, LIMIT)
        for path in folder.iterdir():
            if path.suffix not in (".tmp", ".json"):
                contents = np.empty(path.stat().st_size - HEADER.size, np.uint8)
                found = files.read(bytes.fromhex(path.name), contents)
                damaged, whole = damaged + (not found), whole + found
    return damaged, whole


if __name__ == "__main__":
    sys.exit(main())
