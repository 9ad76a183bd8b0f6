"""The scheduler, with a function of the tokens that the pages hold in place of a model: every answer must be the one
that the request gets alone."""

import random
import time
from collections import deque

import pytest
from paged_model import PagedModel, chains
from samples import sample

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.pages import PAGE, STATE
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.scheduler import QueueFull, Scheduler
from mlc_amd.runtime.errors import UserError

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


# ---- answers


GROUPS = [
    {0: 200}, {0: 14}, {0: 12, 100: 7}, {70: 6}, {0: 30, 64: 9, 200: 11}, {0: 100, 128: 14}, {0: 200, STATE: 12},
    {0: 30, 64: 9, STATE: 3}, {STATE: 2},
]  # fmt: skip


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_the_one_of_the_request_alone(groups, seed):
    draw = random.Random(seed)
    guess, ahead = (draw if seed == 2 else None), (draw if seed == 1 and STATE not in groups else None)
    driver = Driver(groups, guess=guess, ahead=ahead)
    starts = [[draw.randrange(40) for _ in range(length)] for length in (10, 64, 130, 200)]
    for _ in range(50):
        prompt = draw.choice([[], *starts]) + [draw.randrange(40) for _ in range(draw.choice([1, 5, 64, 100]))]
        if draw.random() < 0.3 and driver.requests:  # the next turn of a conversation
            last = draw.choice(driver.requests)
            prompt = [*(last.prompt + last.generated)[:300], 7, 7]
        first = driver.add(prompt, draw.choice([1, 3, 20, 200]), client=draw.randrange(4), sampling=draw.randrange(3))
        for _ in range(draw.choice([0, 0, 0, 0, 3])):
            driver.add(first.fork(sampling=draw.randrange(3)))
        for _ in range(draw.choice([0, 0, 1, 5, 30])):
            driver.step()
        if draw.random() < 0.2:
            driver.scheduler.cancel(draw.choice(driver.requests))
        if draw.random() < 0.1 and (step := driver.started[0] if driver.started else driver.scheduler.plan()):
            if draw.random() < 0.5:
                driver.scheduler.abandon()
                driver.started = None
            else:  # ends during a step
                found = driver.started[1] if driver.started else driver.run(step)
                driver.scheduler.finish(step.answers[0] if step.answers else step.chunk.request, "cancelled")
                driver.complete(step, found)
    driver.finish()
    assert driver.preempted or groups != {0: 14} or driver.guess or driver.ahead
    assert bool(driver.overlaps) == bool(driver.ahead)
    assert bool(driver.drafted) == (bool(driver.guess) and groups.get(STATE, 9) > 2)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("stages", sample([2, 3], [3]))
def test_steps_of_several_stages_change_no_answer(groups, stages):
    draw = random.Random(stages)
    driver = Driver(groups, ahead=draw if STATE not in groups else None, stages=stages)
    starts = [[draw.randrange(40) for _ in range(length)] for length in (10, 64, 130, 200)]
    for _ in range(50):
        prompt = draw.choice([[], *starts]) + [draw.randrange(40) for _ in range(draw.choice([1, 5, 64, 100]))]
        first = driver.add(prompt, draw.choice([1, 3, 20, 200]), client=draw.randrange(4), sampling=draw.randrange(3))
        for _ in range(draw.choice([0, 0, 0, 3])):
            driver.add(first.fork(sampling=draw.randrange(3)))
        for _ in range(draw.choice([0, 0, 1, 5, 30])):
            driver.step()
        if draw.random() < 0.2:
            driver.scheduler.cancel(draw.choice(driver.requests))
        if draw.random() < 0.1 and driver.fill():  # ends during a step
            step = draw.choice(driver.running)[0]
            driver.scheduler.finish(step.answers[0] if step.answers else step.chunk.request, "cancelled")
        if draw.random() < 0.05 and driver.fill():
            driver.scheduler.abandon()
            driver.running.clear()
    driver.finish()
    assert driver.overlaps


def test_several_stages_divide_answers_into_groups():
    driver = Driver({0: 400}, SchedulerLimits(singles=64, running=64), slots=64, stages=2)
    for i in range(9):
        add_long(driver, [i], 40)
    while driver.scheduler.waiting or any(request.sequence.pending > 1 for request in driver.scheduler.running):
        driver.step()
    for _ in range(4):
        driver.step()
    driver.fill()
    assert sorted(len(step.singles) for step, _ in driver.running) == [4, 5]
    driver.finish()


def test_several_stages_compute_chunks_of_one_prompt_at_once():
    driver = Driver({0: 400}, SchedulerLimits(chunk=64, running=64), context=640, stages=2)
    driver.add([7] * 300, 4)
    driver.fill()
    assert [(step.chunk.start, step.chunk.count) for step, _ in driver.running] == [(0, 64), (64, 64), (128, 64)]
    driver.finish()


def test_forks_compute_the_prompt_once():
    driver = Driver({0: 40})
    prompt = [7] * (3 * PAGE + 5)
    first = driver.add(prompt, 4, sampling=1)
    others = [driver.add(first.fork(sampling=seed)) for seed in (2, 3)]
    assert others[0].leader is first and others[0].fork().leader is first
    driver.finish()
    answers = sum(len(request.generated) for request in driver.requests)
    assert driver.computed == len(prompt) + 2 * 5 + answers - 3
    assert [request.cached for request in driver.requests] == [0, 3 * PAGE, 3 * PAGE]


def test_forks_of_a_cancelled_request_go_on():
    driver = Driver({0: 40})
    first = driver.add([7] * 300, 4)
    driver.add(first.fork())
    driver.step()
    driver.scheduler.cancel(first)
    driver.finish()
    assert first.generated == [] and len(driver.requests[1].generated) > 0


def test_the_next_turn_computes_its_own_tokens():
    driver = Driver({0: 40, 100: 9})
    first = driver.add([5] * 150, 30, sampling=1)
    driver.finish()
    said = first.prompt + first.generated
    second = driver.add([*said, 3, 2, 1], 5)
    driver.finish()
    assert second.cached == len(said) - 1  # the last token of an answer is not computed


# ---- fairness


def test_clients_take_turns_with_chunks():
    driver = Driver({0: 400}, SchedulerLimits(chunk=50, running=64), slots=64)
    for _ in range(30):
        driver.add([1, *range(99)], 2, client="many")
    few = driver.add([2, *range(99)], 2, client="few")
    turns = 0
    while not few.generated:
        turns += 1
        driver.step()
    assert turns <= 4
    driver.finish()


def test_a_client_with_hundreds_of_requests_does_not_keep_another_waiting():
    """One chunk after it is admitted, and it is admitted at the next chunk, the other client has its first token."""
    driver = Driver({0: 400}, SchedulerLimits(chunk=96, running=8, queue=1000), slots=64)
    many = [driver.add([1, i, *range(40)], 60, client="many", sampling=i) for i in range(500)]
    while len(driver.scheduler.running) < 8:
        driver.step()
    for _ in range(3):
        driver.step()
    few = driver.add([2, *range(90)], 5, client="few")
    driver.step()
    assert few.state in ("running", "done") and len(few.generated) == 1
    assert driver.preempted == 1 and len(driver.scheduler.running) <= 8
    last = [driver.add([3 + i], 30, client=i, sampling=2) for i in range(10)]  # more clients than places
    while any(not request.generated for request in last):
        driver.step()
    assert driver.preempted < 20  # none for a client that has no fewer
    for request in many[40:]:
        driver.scheduler.cancel(request)
    driver.finish()


def test_more_answers_than_rows_take_turns():
    driver = Driver({0: 400}, SchedulerLimits(singles=4, running=20), slots=64)
    many = [driver.add([1, i], 60, client="many", sampling=i) for i in range(9)]
    few = driver.add([2], 60, client="few", sampling=3)
    while driver.scheduler.waiting or any(request.sequence.pending > 1 for request in driver.scheduler.running):
        driver.step()
    alive = [request for request in many if request.state == "running"]
    steps = [driver.step() for _ in range(4)]
    assert len(alive) > 4 and few.state == "running"
    for step in steps:
        requests = [request for request, _ in step.singles]
        assert few in requests and requests == sorted(requests, key=lambda request: request.number)
    rows = [request for step in steps for request, _ in step.singles]
    assert {rows.count(request) for request in alive if request.state == "running"} <= {1, 2}
    driver.finish()


def test_the_youngest_is_preempted_and_keeps_its_answer():
    driver = Driver({0: 7})
    old, young = (add_long(driver, [token] * 100, 150) for token in (1, 2))
    driver.finish()
    assert driver.preempted == 1
    # What it had was found again, but for the pages that the older one needed.
    needed = 2 * (100 + 150 - 1)
    assert needed <= driver.computed < needed + len(young.prompt)
    assert len(old.generated) == len(young.generated) == 150


def test_requests_wait_for_what_prompts_in_progress_still_need():
    driver = Driver({0: 20})
    for client in range(3):
        driver.add([client] * (9 * PAGE), 5, client=client)
    driver.finish()
    assert driver.preempted == 0


# ---- bounds


def test_what_is_refused():
    scheduler = Scheduler(KvCache({0: 5, 100: 9}, context=640), SchedulerLimits(queue=2))
    for prompt, most in ([1] * 321, None), ([1] * 300, 22):
        with pytest.raises(ContextFull, match=r"holds 320 tokens of one sequence: shorten the prompt"):
            scheduler.add(Request(prompt, most))
    with pytest.raises(UserError, match="no tokens"):
        scheduler.add(Request([]))
    requests = [Request([1] * 300, 21), Request([1] * 320)]
    for request in requests:
        scheduler.add(request)
    assert [request.limit for request in requests] == [21, 1] and scheduler.waiting == 2
    with pytest.raises(QueueFull, match="2 requests are waiting already"):
        scheduler.add(Request([1]))


def test_steps_are_completed_one_by_one():
    driver = Driver({0: 40})
    request = driver.add([3] * 10, 5, sampling=1)
    step = driver.scheduler.plan()
    with pytest.raises(RuntimeError, match="neither completed nor abandoned"):
        driver.scheduler.plan()
    driver.scheduler.abandon()
    with pytest.raises(RuntimeError, match="not the step in progress"):
        driver.scheduler.complete(step, [[1]])
    assert request.sequence.computed == 0
    again = driver.scheduler.plan()
    with pytest.raises(ValueError, match="for a step with 1 answers"):
        driver.scheduler.complete(again, [])


def test_a_request_that_its_driver_does_not_finish_gets_no_more_rows():
    driver = Driver({0: 40})
    request = driver.add([3] * 10, 1)
    driver.scheduler.complete(step := driver.scheduler.plan(), driver.run(step))
    assert driver.scheduler.plan() is None and len(request.generated) == 1
    driver.scheduler.finish(request, "length")
    driver.scheduler.finish(request, "stop")
    assert request.finish == "length" and driver.scheduler.unfinished == 0


def test_cancelled_requests_end_at_the_next_plan():
    driver = Driver({0: 40})
    early = Request([3] * 10, 5)
    driver.scheduler.cancel(early)
    assert driver.step() is None
    running, waiting = driver.add([4] * 10, 50, sampling=1), driver.add([5] * 10, 5)
    driver.add(early)
    driver.step()
    assert running.state == "running" and early.finish == "cancelled"
    for request in (running, waiting):
        driver.scheduler.cancel(request)
    assert running.cancelled and running.state == "running"
    assert driver.scheduler.plan() is None and running.finish == waiting.finish == "cancelled"
    driver.finish()


def test_cost_of_a_step_of_64_answers():
    """Printed, not asserted: machines differ."""
    scheduler = Scheduler(KvCache({0: 4000, 128: 400}, context=4096))
    for i in range(64):
        scheduler.add(Request([i] * 100, 1000, client=i % 7))
    seconds = []
    for _ in range(600):
        begin = time.perf_counter()
        step = scheduler.plan()
        assert step is not None
        scheduler.complete(step, [[1]] * len(step.answers))
        seconds.append(time.perf_counter() - begin)
    assert len(step.singles) == 64
    last = sorted(seconds[-500:])
    print(f"plan() and complete() of 64 answers: median {last[250] * 1e6:.0f} us, worst {last[-1] * 1e6:.0f} us")
