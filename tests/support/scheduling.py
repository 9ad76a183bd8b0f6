"""A scheduler that a test drives, with a function of the tokens that the pages hold in place of a model."""

from collections import deque

from paged_model import PagedModel, chains

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.scheduler import Scheduler

END = 0
SMALL = SchedulerLimits(singles=4, chunk=96, rows=98, running=6, queue=1000)


def choose(chain, seed):
    """The model and its sampler: the token after those of `chain`."""
    return hash((chain, seed)) % 250


def alone(request):
    """The answer without a scheduler."""
    *_, chain = chains(request.prompt)
    answer = []
    while len(answer) < request.limit and (not answer or answer[-1] != END):
        answer.append(choose(chain, request.sampling))
        chain = next(chains(answer[-1:], chain))
    return answer


def add_long(driver, prompt, most):
    """A request of which the answer has `most` tokens."""
    request = Request(prompt, most, limit=most, sampling=0)
    while END in alone(request):
        request.sampling += 1
    return driver.add(request)


class Driver:
    """Runs a scheduler's steps, and checks what holds for each."""

    def __init__(self, groups, limits=SMALL, context=640, slots=5, guess=None, ahead=None, stages=1):
        """guess: a source of random numbers, for drafts; ahead: the same for steps that run before the one before them
        is completed; stages: of GPUs, which compute several steps at once."""
        self.cache = KvCache(groups, context, slots)
        self.scheduler, self.model = Scheduler(self.cache, limits, stages), PagedModel(self.cache)
        self.running = deque()  # steps in progress on several stages, with their tokens
        self.requests, self.preempted, self.computed = [], 0, 0
        self.guess, self.drafted, self.answers = guess, 0, {}
        self.ahead, self.started, self.overlaps = ahead, None, 0  # started: a step that started ahead, and its tokens

    def add(self, *args, **options):
        request = args[0] if isinstance(args[0], Request) else Request(*args, **options)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def run(self, step):
        """The tokens of each answer of the step."""
        found = []
        for (request, sequence), drafts in zip(step.singles, step.drafts, strict=True):
            found.append([])
            for chain, draft in zip(self.model.run(sequence, 1, drafts), [*drafts, None], strict=True):
                found[-1].append(choose(chain, request.sampling))
                if found[-1][-1] in (END, None) or found[-1][-1] != draft:
                    break
        self.computed += len(found)
        if chunk := step.chunk:
            assert chunk.start == chunk.sequence.computed
            if chunk.request.scored is None:
                assert chunk.answers == (chunk.count == chunk.sequence.pending)
            chain = self.model.run(chunk.sequence, chunk.count)[-1]
            self.computed += chunk.count
            found += [[choose(chain, chunk.request.sampling)]] if chunk.answers else []
        return found

    def draft(self, step):
        """Guesses for some answers, of which some are right."""
        drafts = {}
        for request, _ in step.singles:
            if request not in self.answers:
                self.answers[request] = alone(request)
            right = self.answers[request][len(request.generated) :]
            drafts[request] = right[: self.guess.choice([0, 1, 5])] + [1] * self.guess.randrange(3)
        return self.scheduler.draft(step, drafts)

    def run_ahead(self, step, found):
        """Runs the step after one with the tokens `found`, if there is one."""
        following = self.scheduler.plan_ahead(step) if self.ahead and self.ahead.random() < 0.8 else None
        if following:
            self.overlaps += 1
            tokens = []
            for (request, sequence), (token,) in zip(following.singles, found, strict=True):
                chain = self.model.run(sequence, 1, [token])[-1]
                tokens.append([choose(chain, request.sampling)])
            if self.scheduler.groups > 1:
                self.running.append((following, tokens))
            else:
                self.started = following, tokens

    def fill(self):
        """Plans and runs as many steps as may be in progress on several stages."""
        while self.scheduler.may_plan and (step := self.scheduler.plan()):
            self.check(step)
            busy = {request for other, _ in self.running for request in other.answers}
            assert not busy.intersection(step.answers)
            self.running.append((step, self.run(step)))
            self.scheduler.started(step)
            self.overlaps += len(self.running) > 1
        return bool(self.running)

    def step(self):
        if self.scheduler.groups > 1:
            if not self.fill():
                return None
            step, found = self.running[0]
            self.complete(step, found)
            return step
        if self.started:
            step, found = self.started
            self.complete(step, found)
            return step
        before = list(self.scheduler.running)
        step = self.scheduler.plan()
        lost = [request for request in before if request.state == "waiting"]
        self.preempted += len(lost)
        assert not before or before[0] not in lost, "the oldest was preempted"
        if step is None:
            return None
        self.check(step)
        if self.guess and not step.chunk:
            step = self.draft(step)
            assert len(step.singles) + sum(map(len, step.drafts)) <= self.scheduler.limits.singles
            self.drafted += sum(map(len, step.drafts))
        self.complete(step, self.run(step))
        return step

    def complete(self, step, found):
        self.started = None
        if self.running:
            self.running.popleft()
        self.run_ahead(step, found)
        self.scheduler.complete(step, found)
        for request in step.answers:
            if request.state != "done" and (request.generated[-1] == END or len(request.generated) == request.limit):
                self.scheduler.finish(request, "stop" if request.generated[-1] == END else "length")
        if self.scheduler.unfinished % 4 == 0 and not self.started and not self.running:
            self.model.check(self.sequences())

    def sequences(self):
        """Those that may have pages."""
        return [request.sequence for request in self.scheduler.running]

    def check(self, step):
        limits, sequences = self.scheduler.limits, [sequence for _, sequence in step.singles]
        assert all(sequence.pending == 1 for sequence in sequences)
        assert len(step.answers) <= limits.singles and len(self.scheduler.running) <= limits.running
        if step.chunk:
            sequences.append(step.chunk.sequence)
            assert 0 < step.chunk.count <= min(limits.chunk, limits.rows - len(step.singles))
        assert sequences and len({sequence.slot for sequence in sequences}) == len(sequences)

    def finish(self):
        while self.step():
            pass
        assert self.scheduler.unfinished == self.scheduler.waiting == len(list(self.scheduler.admission.queues)) == 0
        self.model.check([])
        pools = [*self.cache.pools.values(), *filter(None, [self.cache.cells])]
        assert all(pool.available == pool.pages for pool in pools)
        for request in self.requests:
            assert request.state == "done"
            answer = alone(request)
            if request.finish == "cancelled":
                assert request.generated == answer[: len(request.generated)]
            else:
                assert request.generated == answer
                assert request.finish == ("stop" if answer[-1] == END else "length")
