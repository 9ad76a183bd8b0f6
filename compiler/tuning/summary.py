"""Summarizes what the database knows of a model's tasks: times, rooflines, progress. Only reads the database."""

from collections.abc import Callable
from typing import NamedTuple

from mlc_amd.compiler.tuning.database import Record, entries
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.schedules.space import space


class TaskRow(NamedTuple):
    """A task and what is known about it. Times are seconds of a call; None if unknown.

    share     share of the total kernel time with the best known plans; tasks without measurements count by `guess`
    best      time of the fastest plan whose results are right; winner: its record
    roofline  0 if unknown
    plans     number of plans; history: measurements in order; failed: number of those without a right result
    """

    task: Task
    share: float
    default: float | None
    best: float | None
    roofline: float
    winner: Record | None
    failed: int
    plans: int
    history: list[Record]


def rows(tasks, arch, roofline: Callable, guess: Callable, bounds: dict[str, float] | None = None) -> list[TaskRow]:
    """The tasks, those with the largest share of the time first. roofline(task, device), guess(task): seconds of a
    call; roofline may return 0. device: where the best plan was measured. bounds: {key of a workload: measured lower
    bound as a share of the default kernel's time}."""
    known, found = entries(arch), []
    for task in tasks:
        entry, choices = known.get(task.workload), space(task.workload, arch)
        winner, untuned = (entry.refresh(choices).winner, entry.untuned) if entry else (None, None)
        history = sorted(entry.records.values(), key=lambda record: record.at) if entry else []
        failed = sum(record.seconds is None or record.refuted for record in history)
        default, best = untuned.seconds if untuned else None, entry.seconds(winner) if entry and winner else None
        least = (bounds or {}).get(task.workload.key, 0) * (default or 0)
        bound = least or roofline(task, winner.device if winner else "")
        plans = len(choices.plans) if choices else 1
        share = task.weight * (best or guess(task))
        found.append(TaskRow(task, share, default, best, bound, winner, failed, plans, history))
    total = sum(row.share for row in found) or 1.0
    return sorted((row._replace(share=row.share / total) for row in found), key=lambda row: -row.share)


def measured(tasks, arch) -> list[Task]:
    """The tasks with any measurement."""
    known = entries(arch)
    return [task for task in tasks if task.workload in known]


def gain(found: list[TaskRow], rooflines: bool = False) -> str:
    """One line that states what tuning has gained: total kernel time before and after. rooflines: also as shares of the
    rooflines."""
    both = [(row.task.weight, row.default, row.best, row.roofline) for row in found if row.default and row.best]
    if not both:
        return "nothing to compare with the default plans yet"
    before, after, least = (sum(row[0] * row[i] for row in both) for i in (1, 2, 3))
    better = sum(best < default for _, default, best, _ in both)
    text = (
        f"{better} of {len(both)} kernels faster, total kernel time {before * 1e3:.2f} -> {after * 1e3:.2f} ms "
        f"({before / after:.2f}x)"
    )
    if not rooflines or not all(roofline for *_, roofline in both):
        return text
    return f"{text}; rooflines {least * 1e3:.2f} ms: {least / before:.0%} -> {least / after:.0%} of it"


def progress(history: list[Record]) -> tuple[list[int], list[float], list[float]]:
    """(numbers, us, best us so far) of the measurements with a time. Wrong plans never count as the best."""
    numbers, times, bests = [], [], []
    for number, record in enumerate(history, 1):
        if record.seconds is not None:
            us = record.seconds * 1e6
            numbers.append(number)
            times.append(us)
            bests.append(min([float("inf") if record.refuted else us, *bests[-1:]]))
    return numbers, times, bests
