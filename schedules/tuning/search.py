"""MetaSchedule's evolutionary search over the plans of one workload, driven step by step: `propose` plans, measure
them, `report`.

A candidate is a trace that draws the plan's numbers and writes them as annotations on the workload's reference.
Mutation redraws one of them, a postproc rejects plans that the arch cannot run, the cost model is XGBoost on features
of ours (`features.py`). Where few plans are left the model ranks them all instead. No plan is proposed twice, and none
that another one's kernel is equal to; what was measured before is reported first, after a restart from the database.
"""

import contextlib
import logging
import random
import sys
import types

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.postproc import PyPostproc
from tvm.s_tir.meta_schedule.runner import RunnerResult
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from mlc_amd.schedules.tuning import traces
from mlc_amd.schedules.tuning.features import features
from mlc_amd.schedules.tuning.spaces import Space
from mlc_amd.schedules.tuning.workload import Workload

POPULATION = 64
WARMUP = 12  # measurements before the cost model is asked
GENERATIONS = 3
MUTATE = 0.9
EPSILON = 0.1  # share of proposals that are drawn at random
RANKED = 512  # most plans that the cost model ranks: in the time of an evolution, and without a miss
INTRINSICS = "tvm.s_tir.tensor_intrin"

# Its C++ code warns through this logger of evolutions that find nothing, which `propose` has an answer to. What breaks
# is an exception.
logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)


class Models:
    """The cost models of a session: one for each type of plan. They are trained when they are asked, not with each
    measurement."""

    def __init__(self):
        self._models = {}
        self._news = {}  # plan type: {search: [(MetaSchedule's candidate, result)] that the model has not seen}

    def of(self, plan_type: type):
        if plan_type not in self._models:
            self._models[plan_type] = _Extractor.model()
        return self._models[plan_type]

    def register(self, search: "Search") -> None:
        """Makes the model know the search's features."""
        self.of(search.space.plan_type).extractor.searches[search.workload.hash] = search

    def tell(self, search: "Search", results: list) -> None:
        self._news.setdefault(search.space.plan_type, {}).setdefault(search, []).extend(results)

    def trained(self, plan_type: type):
        """The model, with all that it was told."""
        model = self.of(plan_type)
        for search, results in self._news.pop(plan_type, {}).items():
            model.update(search.context, *map(list, zip(*results, strict=True)))
        return model


class Search:
    """The search over one workload's space.

    space: of the workload on `arch`. models: shared by the searches of a session. measured: [(plan, seconds or None)]
    of earlier runs, all plans of the space. seed: 1 or more; the same seed and reports give the same proposals, but for
    the cost model's random start.
    """

    def __init__(
        self, workload: Workload, space: Space, arch, models: Models | None = None, measured=(), seed: int = 1
    ):
        self.workload, self.space, self.arch = workload, space, arch
        self.seconds: dict = {}  # plan: seconds, or None where it failed
        self.since_best = 0  # measurements since the last improvement
        self._open: dict = {}  # proposed and not reported: plan -> MetaSchedule's candidate or None
        self._random = random.Random(seed)
        self._models, self._database = models or Models(), ms.database.MemoryDatabase()
        self._models.register(self)
        self._mod, self._batch, self._seed = workload.reference(), None, seed
        self._candidates: dict = {}  # plan: MetaSchedule's candidate
        self._workload = self._database.commit_workload(self._mod)
        if measured:
            self._learn([(plan, seconds, None) for plan, seconds in measured])

    # ---- results so far

    @property
    def ranked(self) -> list:
        """The plans that ran, the fastest first."""
        return sorted(
            (plan for plan, seconds in self.seconds.items() if seconds is not None), key=self.seconds.__getitem__
        )

    @property
    def best(self) -> tuple | None:
        """(plan, seconds) of the fastest one measured."""
        ran = self.ranked
        return (ran[0], self.seconds[ran[0]]) if ran else None

    @property
    def unmeasured(self) -> int:
        """Plans of the space that were neither measured nor proposed."""
        return len(self.space.plans) - len(self.seconds) - len(self._open)

    # ---- the loop

    def propose(self, count: int) -> list:
        """Up to `count` plans to measure next, the default first of all; fewer, or none, when the space has no more."""
        chosen = []
        if not self._known(self.space.default):
            chosen = [self.space.default]
            self._open[self.space.default] = None
        if self.unmeasured > count and len(self.seconds) >= min(count, WARMUP):
            for plan, candidate in (self._evolve(count) if self.unmeasured > RANKED else None) or self._rank(count):
                if len(chosen) < count and not self._known(plan):
                    chosen.append(plan)
                    self._open[plan] = candidate
        for plan in self._random.sample(self.space.plans, len(self.space.plans)):
            if len(chosen) >= count:
                break
            if not self._known(plan):
                chosen.append(plan)
                self._open[plan] = None
        return chosen[:count]

    def report(self, results) -> None:
        """[(plan, seconds or None)] of plans that were proposed, in any order and in several calls."""
        self._learn([(plan, seconds, self._open.pop(plan, None)) for plan, seconds in results])

    def disqualify(self, plan) -> None:
        """A measured plan gave wrong results: it cannot be the best."""
        self.seconds[plan] = None

    def correct(self, plan, seconds: float) -> None:
        """A measured plan was timed again, better."""
        self.seconds[plan] = seconds

    def withdraw(self, plan) -> None:
        """A proposed plan will not be measured now: it may be proposed again."""
        self._open.pop(plan, None)

    # ---- MetaSchedule

    def _known(self, plan) -> bool:
        return plan in self.seconds or plan in self._open

    def _learn(self, results) -> None:
        candidates, outcomes = [], []
        for plan, seconds, candidate in results:
            if plan in self.seconds:
                continue
            best = self.best
            self.since_best = 0 if seconds is not None and (best is None or seconds < best[1]) else self.since_best + 1
            self.seconds[plan] = seconds
            self._database.commit_tuning_record(traces.record(self._mod, self._workload, self.space, plan, seconds))
            candidates.append(candidate or self._candidate(plan))
            outcomes.append(RunnerResult([traces.FAILED if seconds is None else seconds], None))
        if candidates:
            self._models.tell(self, list(zip(candidates, outcomes, strict=True)))
            if self._batch:
                self._strategy.search_strategy.notify_runner_results(candidates, outcomes)

    @property
    def context(self):
        """The TuneContext, made when it is first needed."""
        if not hasattr(self, "_strategy"):
            generator = ms.space_generator.ScheduleFn(
                lambda schedule: traces.draw(schedule, self.space),
                sch_rules=[],
                postprocs=[_Fits(self.space)],
                mutator_probs={_Redraw(self._random): 1.0},
            )
            strategy = ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION,
                init_min_unmeasured=POPULATION // 2,
                genetic_num_iters=GENERATIONS,
                genetic_mutate_prob=MUTATE,
                eps_greedy=EPSILON,
            )
            with _without_intrinsics():
                self._strategy = ms.TuneContext(
                    self._mod, target=traces.target(), space_generator=generator, search_strategy=strategy,
                    task_name=self.workload.key, rand_state=self._seed, num_threads=1,
                )  # fmt: skip
        return self._strategy

    def _candidate(self, plan) -> MeasureCandidate:
        return MeasureCandidate(traces.schedule_of(self._mod, self.space, plan), [])

    def _rank(self, count: int) -> list:
        """(plan, candidate) of the `count` unmeasured plans, less EPSILON of them, that the cost model likes best; of
        many, RANKED of them have a chance."""
        plans = [plan for plan in self.space.plans if not self._known(plan)]
        if len(plans) > RANKED:
            plans = self._random.sample(plans, RANKED)
        self._candidates = {plan: self._candidates.get(plan) or self._candidate(plan) for plan in plans}
        scores = self._models.trained(self.space.plan_type).predict(self.context, list(self._candidates.values()))
        wanted = sum(self._random.random() >= EPSILON for _ in range(count))
        best = np.argsort(-scores, kind="stable")[:wanted]
        return [(plans[i], self._candidates[plans[i]]) for i in best]

    def _evolve(self, count: int) -> list:
        """(plan, candidate) of what evolution comes up with: nothing where it draws too few plans that the arch can
        run."""
        context, model = self.context, self._models.trained(self.space.plan_type)
        if self._batch != count:  # its batches have a fixed size
            if self._batch:
                context.post_tuning()
            context.pre_tuning(1 << 30, count, context.generate_design_space(), self._database, model)
            self._batch = count
        candidates = context.generate_measure_candidates()
        return [
            (self.space.equal(traces.plan_of(candidate.sch, self.space)), candidate) for candidate in candidates or []
        ]


@contextlib.contextmanager
def _without_intrinsics():
    """TuneContext imports TVM's tensor intrinsics, 13 seconds of parsing that nothing here uses: an empty module in
    their place."""
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
        return self.space.valid(traces.plan_of(schedule, self.space)) is None

    def clone(self):
        return _Fits(self.space)


@derived_object
class _Redraw(PyMutator):
    """Another value for one of the plan's numbers; now and then a neighbouring one."""

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
    """Features of candidates: `searches` by the hash of their workload."""

    def __init__(self):
        super().__init__()
        self.searches: dict[str, Search] = {}

    def extract_from(self, context, candidates):
        search = self.searches[Workload.of(context.mod).hash]
        plans = [traces.plan_of(candidate.sch, search.space) for candidate in candidates]
        rows = [features(search.workload, search.space, plan, search.arch) for plan in plans]
        return [tvm.runtime.tensor(np.atleast_2d(row)) for row in rows]

    @staticmethod
    def model():
        return ms.cost_model.XGBModel(
            extractor=_Extractor(),
            num_warmup_samples=WARMUP,
            config=ms.cost_model.xgb_model.XGBConfig(nthread=1, tree_method="hist"),
        )
