"""MetaSchedule's evolutionary search over the plans of one workload, step by step: `propose` plans, measure them,
`report` the results.

Kernels are built by functions that take a plan, so MetaSchedule never sees a kernel. Its candidates are traces, which
draw the values of a plan and annotate them on the only block of a module that represents the workload. Mutation draws
one of the values again, a postprocessor rejects plans that the arch cannot run, and the cost model is XGBoost on
features of the plan. If few plans are left, the model ranks all of them instead. No plan is proposed twice, nor a plan
whose kernel equals that of another plan.
"""

import contextlib
import logging
import math
import random
import sys
import types
from collections import defaultdict
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import s_tir, te
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.postproc import PyPostproc
from tvm.s_tir.meta_schedule.runner import RunnerResult
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from mlc_amd.schedules.operators import Operator
from mlc_amd.schedules.space import Space

POPULATION = 64
WARMUP = 12  # measurements before the cost model is used
GENERATIONS = 3
MUTATE = 0.9
EPSILON = 0.1  # share of proposals that are drawn at random
RANKED = 512  # the largest number of plans that the cost model ranks; this takes as long as an evolution
INTRINSICS = "tvm.s_tir.tensor_intrin"
ATTRIBUTE, BLOCK, PREFIX = "mlc_amd.workload", "task", "plan."  # names in the module of `reference`; of annotations
FAILED = 1e10  # "seconds" of a plan that could not be measured, as in MetaSchedule's own databases
TARGET = {"kind": "llvm"}  # not used: MetaSchedule compiles nothing
SIZES = ("m", "k", "n", "heads", "kv_heads", "d", "ctx")  # sizes of a workload; 0 for those that it does not have

# MetaSchedule's C++ code warns through this logger if an evolution finds no plan; `propose` then draws at random.
logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)


# ---- plans as MetaSchedule's traces


def reference(workload: Operator) -> tvm.IRModule:
    """The module that represents a workload to MetaSchedule. Equal workloads have structurally equal modules."""
    x = te.placeholder((1,), "float32", name="x")
    y: Any = te.compute((1,), lambda i: x[i], name=BLOCK)
    func = te.create_prim_func([x, y]).without_attr("global_symbol").with_attr(ATTRIBUTE, workload.text)
    return tvm.IRModule({"main": func})


def draw(schedule: s_tir.Schedule, space: Space, plan=None) -> None:
    """Draws the values of `plan`, or random values without one, and annotates them."""
    block = schedule.get_sblock(BLOCK)
    for name, values in space.choices.items():
        decision = None if plan is None else values.index(getattr(plan, name))
        drawn = schedule.sample_categorical(list(values), [1 / len(values)] * len(values), decision=decision)
        schedule.annotate(block, PREFIX + name, drawn)


def plan_of(schedule: s_tir.Schedule, space: Space):
    """The plan in a schedule's annotations."""
    found: Any = schedule.get(schedule.get_sblock(BLOCK))
    return space.plan_type(**{name: int(found.annotations[PREFIX + name]) for name in space.choices})


# ---- the cost model


def features(workload: Operator, space: Space, plan, arch) -> np.ndarray:
    """The features of a plan, float32 [features]. All workloads whose spaces have the same plan type share a model, so
    they have the same number of features, and the workload's sizes are among them. Most are logarithms, which trees can
    split well. Raises ValueError or UserError as `Space.kernel` does."""
    kernel, values = space.kernel(plan), [getattr(plan, name) for name in space.choices]
    threads = kernel.workgroups * kernel.threads
    waves, last = threads / getattr(arch, "wave", 1), kernel.workgroups / getattr(arch, "units", 1)
    derived = kernel.workgroups, kernel.threads, kernel.loads, waves, threads * kernel.loads
    idle = 1 - last / math.ceil(last)  # share of the compute units that are idle while the last workgroups run
    ratios = [math.log2((1 + a) / (1 + b)) for i, a in enumerate(values) for b in values[:i]]
    args = workload.args | workload.args.get("layer", {}) | {"n": sum(rows for _, rows in workload.weights)}
    sizes = [args.get(name) or 0 for name in SIZES]
    bits = [fmt.block_bytes * 8 / fmt.block for fmt, _ in workload.weights] or [0]
    logs = [math.log2(1 + value) for value in (*values, *derived, *sizes)]
    return np.array([*logs, *ratios, idle, len(workload.weights), max(bits), min(bits)], np.float32)


class CostModel:
    """A cost model. Searches with the same type of plan share one.

    searches: {text of the workload: search}. untrained: {search: (MetaSchedule's candidates, results) for the next
    training}.
    """

    def __init__(self):
        self.searches: dict[str, Search] = {}
        self.untrained: dict[Search, list] = defaultdict(list)
        config = ms.cost_model.xgb_model.XGBConfig(nthread=1, tree_method="hist")
        extractor: Any = _Extractor(self.searches)  # Any: TVM accepts any object with the method
        self._model: Any = ms.cost_model.XGBModel(extractor=extractor, num_warmup_samples=WARMUP, config=config)

    def trained(self):
        """MetaSchedule's model, trained with all results so far. Training happens here, not with each measurement."""
        for search, results in self.untrained.items():
            self._model.update(search.context, *map(list, zip(*results, strict=True)))
        self.untrained.clear()
        return self._model


class Search:
    """The search over the space of one workload.

    space: the workload's space on `arch`. model: may be shared with other searches. measured: [(plan, seconds or None)]
    of earlier runs, all plans of the space. seed: 1 or more; the same seed and reports lead to the same proposals,
    except for the cost model's random start. first: plans of the space to be proposed after the default plan.

    seconds: {measured plan: seconds, None if it failed}. since_best: number of measurements since the last improvement.
    """

    def __init__(
        self,
        workload: Operator,
        space: Space,
        arch,
        model: CostModel | None = None,
        measured=(),
        seed: int = 1,
        first=(),
    ):
        self.workload, self.space, self.arch, self.first = workload, space, arch, first
        self.seconds: dict = {}
        self.since_best = 0
        self._open: set = set()  # plans that were proposed and not reported yet
        self._random = random.Random(seed)
        self._model, self._database = model or CostModel(), ms.database.MemoryDatabase()
        self._model.searches[workload.text] = self
        self._mod, self._batch, self._seed = reference(workload), None, seed
        self._workload = self._database.commit_workload(self._mod)
        if measured:
            self.report(measured)

    @property
    def ranked(self) -> list[tuple[Any, float]]:
        """(plan, seconds) of the plans that ran, the fastest first."""
        ran = [(plan, seconds) for plan, seconds in self.seconds.items() if seconds is not None]
        return sorted(ran, key=lambda pair: pair[1])

    @property
    def best(self) -> tuple | None:
        """(plan, seconds) of the fastest measured plan, or None."""
        return next(iter(self.ranked), None)

    @property
    def unmeasured(self) -> int:
        """The number of plans of the space that were neither measured nor proposed."""
        return len(self.space.plans) - len(self.seconds) - len(self._open)

    @property
    def pending(self) -> list:
        """The plans to measure before others, not measured or proposed yet: the default plan and `first`."""
        return [plan for plan in dict.fromkeys([self.space.default, *self.first]) if not self._known(plan)]

    def propose(self, count: int) -> list:
        """Up to `count` plans to measure next, the default plan first. Fewer, or none, if the space has no more."""
        chosen = []

        def take(plans) -> None:
            for plan in plans:
                if len(chosen) < count and not self._known(plan):
                    chosen.append(plan)
                    self._open.add(plan)

        take(self.pending)
        if self.unmeasured > count and len(self.seconds) >= min(count, WARMUP):
            take((self._evolve(count) if self.unmeasured > RANKED else None) or self._rank(count))
        take(self._random.sample(self.space.plans, len(self.space.plans)))
        return chosen

    def report(self, results) -> None:
        """Reports results [(plan, seconds or None)] of proposed plans, in any order and in several calls."""
        candidates, outcomes = [], []
        arguments = ms.arg_info.ArgInfo.from_prim_func(self._mod["main"])
        for plan, seconds in results:
            self._open.discard(plan)
            if plan in self.seconds:
                continue
            best = self.best
            self.since_best = 0 if seconds is not None and (best is None or seconds < best[1]) else self.since_best + 1
            self.seconds[plan] = seconds
            candidate, times = self._candidate(plan), [FAILED if seconds is None else seconds]
            trace: Any = candidate.sch.trace
            record = ms.database.TuningRecord(trace, self._workload, times, tvm.target.Target(TARGET), arguments)
            self._database.commit_tuning_record(record)
            candidates.append(candidate)
            outcomes.append(RunnerResult(times, None))
        if candidates:
            self._model.untrained[self] += zip(candidates, outcomes, strict=True)
            if self._batch:
                self.context.notify_runner_results(candidates, outcomes)

    def correct(self, plan, seconds: float | None) -> None:
        """Replaces the time of a measured plan. None: its results were wrong."""
        self.seconds[plan] = seconds

    def withdraw(self, plan) -> None:
        """Marks a proposed plan as not measured, so that it may be proposed again."""
        self._open.discard(plan)

    # ---- MetaSchedule

    def _known(self, plan) -> bool:
        return plan in self.seconds or plan in self._open

    @cached_property
    def context(self) -> ms.TuneContext:
        """MetaSchedule's context, created at its first use."""
        postprocs: Any = [_Fits(self.space)]
        mutators: Any = {_Redraw(self._random): 1.0}
        generator = ms.space_generator.ScheduleFn(lambda schedule: draw(schedule, self.space), [], postprocs, mutators)
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=POPULATION,
            init_min_unmeasured=POPULATION // 2,
            genetic_num_iters=GENERATIONS,
            genetic_mutate_prob=MUTATE,
            eps_greedy=EPSILON,
        )
        with _without_intrinsics():
            return ms.TuneContext(
                self._mod, target=tvm.target.Target(TARGET), space_generator=generator, search_strategy=strategy,
                task_name=self.workload.key, rand_state=self._seed, num_threads=1,
            )  # fmt: skip

    def _candidate(self, plan) -> MeasureCandidate:
        schedule = s_tir.Schedule(self._mod)
        draw(schedule, self.space, plan)
        return MeasureCandidate(schedule, [])

    def _rank(self, count: int) -> list:
        """Unmeasured plans that the cost model ranks first: about `count` * (1 - EPSILON) of them. If more than RANKED
        plans are unmeasured, only a sample is ranked."""
        plans = [plan for plan in self.space.plans if not self._known(plan)]
        if len(plans) > RANKED:
            plans = self._random.sample(plans, RANKED)
        scores = self._model.trained().predict(self.context, [self._candidate(plan) for plan in plans])
        wanted = sum(self._random.random() >= EPSILON for _ in range(count))
        return [plans[i] for i in np.argsort(-scores, kind="stable")[:wanted]]

    def _evolve(self, count: int) -> list:
        """Plans from an evolution; [] if too few random plans can run on the arch."""
        context, model = self.context, self._model.trained()
        if self._batch != count:  # MetaSchedule's batches have a fixed size
            if self._batch:
                context.post_tuning()
            context.pre_tuning(1 << 30, count, context.generate_design_space(), self._database, model)
            self._batch = count
        found = context.generate_measure_candidates() or []
        return [self.space.equal(plan_of(candidate.sch, self.space)) for candidate in found]


@contextlib.contextmanager
def _without_intrinsics():
    """Replaces TVM's tensor intrinsics by an empty module while TuneContext imports them: parsing them takes 13
    seconds, and nothing here uses them."""
    if INTRINSICS in sys.modules:
        yield
        return
    sys.modules[INTRINSICS] = types.ModuleType(INTRINSICS)
    try:
        yield
    finally:
        del sys.modules[INTRINSICS]


@derived_object
class _Fits(PyPostproc):
    """Rejects plans that the arch cannot run."""

    def __init__(self, space: Space):
        super().__init__()
        self.space = space

    def _initialize_with_tune_context(self, context) -> None:
        """There is nothing to prepare."""

    def apply(self, schedule) -> bool:
        return self.space.valid(plan_of(schedule, self.space)) is None

    def clone(self):
        return _Fits(self.space)


@derived_object
class _Redraw(PyMutator):
    """Draws another value for one of the plan's fields; half of the time a neighbouring value."""

    def __init__(self, source: random.Random):
        super().__init__()
        self.source = source

    def _initialize_with_tune_context(self, context) -> None:
        """There is nothing to prepare."""

    def apply(self, trace, _):
        drawn = [(step, int(decision)) for step, decision in trace.decisions.items() if len(step.attrs[0]) > 1]
        if not drawn:
            return None
        step, now = self.source.choice(drawn)
        others = [i for i in range(len(step.attrs[0])) if i != now]
        near = [i for i in others if abs(i - now) == 1]
        return trace.with_decision(
            step, self.source.choice(near if self.source.random() < 0.5 else others), remove_postproc=True
        )

    def clone(self):
        return _Redraw(random.Random(self.source.randrange(1 << 30)))


@derived_object
class _Extractor(PyFeatureExtractor):
    """The features of candidates. searches: by the text of the workload."""

    def __init__(self, searches: dict[str, Search]):
        super().__init__()
        self.searches = searches

    def extract_from(self, context: Any, candidates):
        search = self.searches[str(context.mod["main"].attrs[ATTRIBUTE])]
        plans = [plan_of(candidate.sch, search.space) for candidate in candidates]
        rows = [features(search.workload, search.space, plan, search.arch) for plan in plans]
        return [tvm.runtime.tensor(np.atleast_2d(row)) for row in rows]
