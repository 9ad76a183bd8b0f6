"""The helper of fuzzing programs: each kind of end is distinguished, and runs continue."""

import os
import signal
import time

import pytest

from mlc_amd.runtime.errors import UserError
from tests.dev.fuzz import fuzzing
from tests.dev.fuzz.fuzzing import Case, Limits


def raises(error):
    def act():
        raise error

    return act


ACTS = {
    fuzzing.EQUAL: lambda: True,
    fuzzing.DIFFERENT: lambda: False,
    fuzzing.ACCEPTED: lambda: None,
    fuzzing.REFUSED: raises(UserError("the file is damaged; make it again")),
    fuzzing.UNCLEAN: raises(UserError("long" * 1000)),
    fuzzing.TRACEBACK: raises(KeyError("x")),
    fuzzing.CRASH: lambda: os.kill(os.getpid(), signal.SIGSEGV),
    fuzzing.HANG: lambda: time.sleep(60),
    fuzzing.MEMORY: lambda: bool(bytearray(2 << 30)),
}


def control() -> Case:
    return Case("control", "", lambda: True)


@pytest.fixture(scope="module")
def results():
    names = {fuzzing.generator(5, number).random(): name for number, name in enumerate(ACTS)}

    def make(draw):
        name = names[draw.random()]
        return Case(name, f"ends as {name}", ACTS[name])

    return list(fuzzing.run(make, control, 5, range(len(ACTS)), Limits(2.0, 1 << 30)))


def test_outcomes_are_told_apart(results):
    assert [result.outcome for result in results] == [fuzzing.EQUAL, *ACTS]
    assert [result.number for result in results] == [fuzzing.CONTROL, *range(len(ACTS))]
    assert "SIGSEGV" in next(result.detail for result in results if result.outcome == fuzzing.CRASH)
    assert "in <lambda>" in next(result.detail for result in results if result.outcome == fuzzing.HANG)


def test_table_and_defects(results):
    lines = fuzzing.table(results).splitlines()
    assert lines[0].split()[:3] == ["cases", "refused", "equal"] and lines[-1].split()[1] == str(len(ACTS) + 1)
    assert len(fuzzing.defects(results)) == len(fuzzing.DEFECTS)


def test_a_journal_continues(tmp_path, capsys):
    def make(draw):
        return Case("number", str(draw.random()), lambda: None)

    journal = tmp_path / "journal"
    for count in (3, 5):
        assert fuzzing.main("", make, control, argv=["--count", str(count), "--journal", str(journal)]) == 0
    assert "next case 5" in capsys.readouterr().out
    whats = [line.split('"what": ')[1].split(",")[0] for line in journal.read_text().splitlines() if "number" in line]
    assert len(set(whats) - {'""'}) == 5
