"""What programs that fuzz readers of files and texts share: cases that a seed determines, run in forked processes with
limits, and a table of their outcomes.

In: a function that makes a `Case` from a random generator, and a `Case` of undamaged input, the control. Out: a
`Result` for each, in order. A driver ends with

    if __name__ == "__main__":
        sys.exit(fuzzing.main(__doc__, make, control))

which has the flags --seed, --count, --first and --journal. The journal has a line for each case; a run that is started
again with the same journal and seed continues after the last one. Case n of a seed is always the same, so that
`--first n --count 1` repeats it.

The parent process must have imported what the cases need, and must not have started threads.
"""

import argparse
import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlc_amd.runtime.errors import UserError

# Outcomes. Those in DEFECTS are the program's fault.
REFUSED, EQUAL, ACCEPTED = "refused", "equal", "accepted"
DIFFERENT, TRACEBACK, UNCLEAN = "different", "traceback", "unclean message"
CRASH, HANG, MEMORY = "crash", "hang", "memory"
DEFECTS = (DIFFERENT, TRACEBACK, UNCLEAN, CRASH, HANG, MEMORY)
OUTCOMES = (REFUSED, EQUAL, ACCEPTED, *DEFECTS)

LONGEST = 1000  # characters of a message
BATCH = 500  # cases of a process; a control is run before each batch
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Case:
    """kind: a row of the table. what: what was changed, for people. act: reads the input: True when the result is the
    control's, False when it is another one, None when there is nothing to compare; or raises."""

    kind: str
    what: str
    act: Callable[[], bool | None]


@dataclass(frozen=True)
class Result:
    """detail: the message of a refusal, the traceback, or what a process that died wrote last."""

    number: int
    kind: str
    what: str
    outcome: str
    detail: str
    seconds: float


@dataclass(frozen=True)
class Limits:
    """Of a case. seconds: without an answer it hangs. memory: bytes of address space beyond what its process began
    with."""

    seconds: float = 5.0
    memory: int = 1 << 30


Maker = Callable[[random.Random], Case]
CONTROL = -1  # the number of a control


def generator(seed: int, number: int) -> random.Random:
    """The random numbers of a case."""
    return random.Random(f"{seed}/{number}")


# ---- one case


def judge(act: Callable[[], bool | None]) -> tuple[str, str]:
    """(outcome, detail) of an action, in this process."""
    try:
        same = act()
    except UserError as error:
        message = str(error)
        return (UNCLEAN if (why := unclean(message)) else REFUSED), f"{why}: {message!r}" if why else message
    except MemoryError:
        return MEMORY, _last_lines(traceback.format_exc())
    except BaseException:
        return TRACEBACK, _last_lines(traceback.format_exc())
    return {True: EQUAL, False: DIFFERENT, None: ACCEPTED}[same], ""


def unclean(message: str) -> str:
    """What is wrong with a message for a user; "" for a good one: a line of printable text."""
    if not message.strip():
        return "empty"
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in message):
        return "control characters"
    return "too long" if len(message) > LONGEST else ""


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-count:])[-4000:]


# ---- many cases


def run(
    make: Maker, control: Callable[[], Case], seed: int, numbers: Iterable[int], limits: Limits | None = None
) -> Iterator[Result]:
    """The results of the cases, with those of controls between them, whose number is CONTROL."""
    limits = limits or Limits()
    for batch in _batched(numbers, BATCH):
        todo = [CONTROL, *batch]
        while todo:
            for result in _run_some(make, control, seed, tuple(todo), limits):
                todo.remove(result.number)
                yield result


def _batched(numbers: Iterable[int], count: int) -> Iterator[tuple[int, ...]]:
    """itertools.batched, which Python 3.11 lacks."""
    source = iter(numbers)
    while batch := tuple(itertools.islice(source, count)):
        yield batch


def _run_some(make: Maker, control, seed: int, numbers: Sequence[int], limits: Limits) -> Iterator[Result]:
    """The results of the first cases, at least of one: until all are done, or the process had to end."""
    here, there = _FORK.Pipe(duplex=False)
    with tempfile.TemporaryFile() as log:
        child = _FORK.Process(target=_work, args=(make, control, seed, numbers, limits, there, log.fileno()))
        child.start()
        there.close()
        try:
            for number in numbers:
                kind, what, start = "?", "", time.monotonic()
                try:
                    kind, what = _receive(here, limits.seconds)
                    start = time.monotonic()
                    outcome, detail = _receive(here, limits.seconds)
                except TimeoutError:
                    outcome, detail = HANG, _written(log)
                except EOFError:
                    child.join()
                    outcome, detail = CRASH, f"{_end(child.exitcode or 0)}: {_written(log)}"
                yield Result(number, kind, what, outcome, detail, time.monotonic() - start)
                if outcome in (HANG, CRASH, MEMORY):
                    return
        finally:
            child.kill()
            child.join()
            here.close()


def once(act: Callable[[], Any]) -> Any:
    """What `act` returns in a forked process: the calling one stays without threads. RuntimeError where it fails."""
    here, there = _FORK.Pipe(duplex=False)

    def work() -> None:
        try:
            there.send((True, act()))
        except BaseException:
            there.send((False, traceback.format_exc()))

    child = _FORK.Process(target=work)
    child.start()
    there.close()
    good, value = here.recv()
    child.join()
    if not good:
        raise RuntimeError(f"the good input fails:\n{value}")
    return value


def _receive(pipe, seconds: float):
    if not pipe.poll(2 * seconds):  # the child ends itself before that, with the place where it was
        raise TimeoutError
    return pipe.recv()


def _end(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _written(log) -> str:
    """The last lines that a child wrote; where Python's fault handler told where it was, the innermost places."""
    log.seek(0)
    text = log.read().decode(errors="replace")
    _, mark, places = text.rpartition("(most recent call first):\n")
    return "\n".join(places.splitlines()[:12]) if mark else _last_lines(text)


def _work(make: Maker, control, seed: int, numbers: Sequence[int], limits: Limits, pipe, log: int) -> None:
    """The child: sends what a case is, then how it ended."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(2)
    most = _address_space() + limits.memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        try:
            case = control() if number == CONTROL else make(generator(seed, number))
        except BaseException:
            pipe.send(("driver", "the case cannot be made"))
            pipe.send((TRACEBACK, _last_lines(traceback.format_exc())))
            continue
        pipe.send((case.kind, case.what))
        faulthandler.dump_traceback_later(limits.seconds, file=2)
        outcome = judge(case.act)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(outcome)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


# ---- the report


def table(results: Iterable[Result]) -> str:
    """How many cases of each kind had which outcome."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault("control" if result.number == CONTROL else result.kind, Counter())[result.outcome] += 1
    columns = [outcome for outcome in OUTCOMES if any(outcome in row for row in counts.values())]
    rows = [[kind, sum(row.values()), *(row[outcome] for outcome in columns)] for kind, row in sorted(counts.items())]
    total = ["total", *(sum(row[i] for row in rows) for i in range(1, len(columns) + 2))]
    cells = [[str(cell) for cell in row] for row in [["", "cases", *columns], *rows, total]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        f"{row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in cells
    )


def is_defect(result: Result) -> bool:
    return result.outcome in DEFECTS or (result.number == CONTROL and result.outcome not in (EQUAL, ACCEPTED))


def defects(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results that are the program's fault, by where it failed."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if is_defect(result):
            found.setdefault(_place(result), []).append(result)
    return found


def _place(result: Result) -> str:
    """The last place of ours in a traceback, and the error; else the outcome."""
    places = re.findall(r'File "[^"]*?([\w-]+/[\w-]+\.py)", line (\d+)', result.detail)
    if result.outcome in (CRASH, HANG):
        places.reverse()  # the fault handler's innermost place is the first
    last = result.detail.splitlines()[-1][:80] if result.detail else ""
    name, line = places[-1] if places else ("", "")
    return f"{result.outcome}  {name}{':' if name else ''}{line}  {re.sub(r'[0-9]+', '#', last)}"


def _journaled(path: Path, seed: int) -> list[Result]:
    """The results of earlier runs with that seed."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [Result(**{k: v for k, v in line.items() if k != "seed"}) for line in lines if line["seed"] == seed]


def main(
    doc: str | None,
    make: Maker,
    control: Callable[[], Case],
    limits: Limits | None = None,
    argv: list[str] | None = None,
) -> int:
    """The command line of a driver; its exit code: 1 if there are defects."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--count", type=int, default=1000, help="cases in all, with those of the journal; 0: its table only"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--journal", type=Path, help="a file with a line for each case; the run continues after it")
    given = parser.parse_args(argv)
    os.nice(10)
    done = _journaled(given.journal, given.seed) if given.journal else []
    start = max((result.number + 1 for result in done), default=given.first)
    with contextlib.ExitStack() as held:
        journal = held.enter_context(open(given.journal, "a")) if given.journal else None
        with contextlib.suppress(KeyboardInterrupt):
            for result in run(make, control, given.seed, range(start, given.first + given.count), limits):
                done.append(result)
                if journal:
                    journal.write(json.dumps({"seed": given.seed, **asdict(result)}) + "\n")
                    journal.flush()
    found = defects(done)
    for place, results in sorted(found.items(), key=lambda item: -len(item[1])):
        first = results[0]
        print(f"{len(results):6}  {place}\n        first: case {first.number}, {first.kind}: {first.what}")
    print(table(done))
    print(f"seed {given.seed}, next case {max((result.number + 1 for result in done), default=given.first)}")
    return bool(found)
