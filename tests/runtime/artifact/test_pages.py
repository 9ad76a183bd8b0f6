"""Pages, the index of prefixes and sequences: random histories against a model of what pages contain, and the rules
that decide what is kept."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paged_model import PagedModel

from mlc_amd.runtime.cache.kv_cache import KvCache, seen_pages
from mlc_amd.runtime.cache.pages import PAGE, STATE, PagePool
from mlc_amd.runtime.cache.prefixes import ROOT, PrefixIndex, digest
from mlc_amd.runtime.cache.sequence import RELEASED, SNAPSHOTS

GROUPS = [
    {0: 10}, {0: 12, 40: 5}, {0: 12, 64: 6, 200: 7}, {100: 5}, {1: 5, 0: 12}, {0: 12, STATE: 4},
    {0: 12, 100: 6, STATE: 7}, {STATE: 3},
]  # fmt: skip
# Runs of one token: few different ones, so that sequences have prefixes in common.
RUNS = st.tuples(st.integers(0, 1), st.sampled_from([1, 20, 40, 63, 64, 65, 130]))
TOKENS = st.lists(RUNS, min_size=1, max_size=3).map(lambda runs: [token for token, n in runs for _ in range(n)])
WHICH = st.integers(0, 11)


def compute(cache, sequence, count=None):
    count = sequence.pending if count is None else count
    assert sequence.reserve(count)
    cache.assign_slots([sequence])
    sequence.advance(count)


def prefill(cache, sequence):
    while sequence.pending:
        compute(cache, sequence, sequence.step_size(512))


class Histories(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from(GROUPS), slots=st.integers(2, 4))
    def begin(self, groups, slots):
        self.cache = KvCache(groups, context=640, slots=slots)
        self.model, self.live = PagedModel(self.cache), []

    @rule(tokens=TOKENS)
    def new(self, tokens):
        sequence = self.cache.sequence(tokens)
        assert sequence.match() < len(tokens)
        self.live.append(sequence)

    def pick(self, which):
        """One of the live sequences; the first is made when there is none."""
        if not self.live:
            self.live.append(self.cache.sequence([0] * 150))
        return self.live[which % len(self.live)]

    @rule(which=WHICH)
    def match(self, which):
        sequence = self.pick(which)
        before = sequence.computed
        assert sequence.match() == sequence.computed >= before

    @rule(which=WHICH, tokens=TOKENS)
    def append(self, which, tokens):
        sequence = self.pick(which)
        sequence.append(tokens[: self.cache.context - len(sequence.tokens)])

    @rule(which=WHICH, count=st.sampled_from([1, 2, 31, 64, 100, 640]))
    def chunk(self, which, count):
        sequence = self.pick(which)
        count = sequence.step_size(count)
        room, available = sequence.room, [pool.available for pool in self.cache.pools.values()]
        assert sequence.reserve(count) == (count <= room)
        if count > room:
            assert [pool.available for pool in self.cache.pools.values()] == available
        elif count:
            self.cache.assign_slots([sequence])
            self.model.run(sequence, count)
            sequence.advance(count)

    @rule(which=WHICH, count=st.sampled_from([1, 31, 64]))
    def failure(self, which, count):
        sequence = self.pick(which)
        count, before = sequence.step_size(count), sequence.computed
        if count and sequence.reserve(count):
            self.cache.assign_slots([sequence])
            self.model.run(sequence, count)
            sequence.abandon()
            assert sequence.computed <= before and (self.cache.cells or sequence.computed == before)

    @rule(chosen=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def singles(self, chosen):
        step = list({id(s): s for i in chosen for s in self.live[i : i + 1] if s.pending}.values())[: self.cache.slots]
        step = [sequence for sequence in step if sequence.reserve(1)]
        self.cache.assign_slots(step)
        assert len({sequence.slot for sequence in step}) == len(step)
        for sequence in step:
            self.model.run(sequence, 1)
        for sequence in step:
            sequence.advance(1)

    @rule(which=WHICH, part=st.floats(0, 1))
    def truncate(self, which, part):
        sequence = self.pick(which)
        n, before = round(part * len(sequence.tokens)), sequence.computed
        sequence.truncate(n)
        assert len(sequence.tokens) == n and sequence.computed <= n
        if not any(self.cache.pools) and not self.cache.cells:
            assert sequence.computed >= min(n // PAGE * PAGE, before)

    @rule(which=WHICH)
    def preempt(self, which):
        sequence = self.pick(which)
        sequence.free()
        assert sequence.computed == 0

    @rule(which=WHICH)
    def free(self, which):
        sequence = self.pick(which)
        sequence.free()
        self.live.remove(sequence)

    @invariant()
    def pages_hold_their_tokens(self):
        if hasattr(self, "live"):
            self.model.check(self.live)

    def teardown(self):
        if not hasattr(self, "live"):
            return
        for sequence in self.live:
            sequence.free()
        self.model.check([])
        for pool in [*self.cache.pools.values(), *filter(None, [self.cache.cells])]:
            pages = {pool.allocate() for _ in range(pool.pages)}
            assert len(pages) == pool.pages and not any(pool.indexed(page) for page in pages)
            with pytest.raises(IndexError, match="pages are held"):
                pool.allocate()
        assert len(self.cache.index) == 0


Histories.TestCase.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, derandomize=True, database=None
)
TestHistories = Histories.TestCase


# ---- pools


def test_pages_are_given_out_free_ones_first_then_idle_ones_as_released():
    evicted = []
    pool = PagePool(4)
    pool.evicted = lambda page: (evicted.append(page), pool.forget(page))
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.index(page)
    pool.release(pages[1])
    pool.release(pages[0])
    pool.release(pages[2], soon=True)
    pool.retain(pages[1])
    assert (pool.free, pool.idle, pool.available) == (1, 2, 3)
    assert pool.allocate() not in pages and not evicted
    assert [pool.allocate(), pool.allocate()] == [pages[2], pages[0]] == evicted
    with pytest.raises(IndexError):
        pool.allocate()
    pool.forget(pages[1])
    pool.release(pages[1])
    assert (pool.free, pool.idle) == (1, 0)


# ---- prefixes


def test_a_prefix_is_usable_if_windowed_groups_have_what_the_next_row_sees():
    index = PrefixIndex({0: PagePool(9), 100: PagePool(9)})
    chain = [digest(ROOT, [1] * PAGE)]
    for _ in range(4):
        chain.append(digest(chain[-1], [1] * PAGE))
    for i, known in enumerate(chain[:4]):
        index.add(known, 0, index.pools[0].allocate())
        if i in (1, 2):
            index.add(known, 100, index.pools[100].allocate())
    # After n pages a row sees the last 99 keys, that is, two pages: those of n = 3 are there.
    assert [index.usable(chain[:n]) for n in range(6)] == [0, 0, 0, 3, 3, 3]


def test_a_tail_is_taken_up_to_the_common_prefix():
    pools = {0: PagePool(9), 32: PagePool(9)}
    index = PrefixIndex(pools)

    def add(tokens):
        pages = {span: pool.allocate() for span, pool in pools.items()}
        index.add_tail(ROOT, tokens, pages)
        for span, page in pages.items():
            pools[span].release(page)
        return pages

    first = add([1, 2, 3, 4])
    add([1, 2, 3])  # the first one begins with it
    assert pools[0].idle == 1
    longer = add([1, 2, 3, 4, 5])
    assert pools[0].idle == 1 and first != longer
    other = add([1, 9])
    assert index.take_tail(ROOT, [1, 2, 8]) == (0, {})  # 2 of 5
    assert index.take_tail(b"other", [1, 2, 3, 4]) == (0, {})
    assert index.take_tail(ROOT, [1, 2, 3, 9]) == (3, longer)
    assert index.take_tail(ROOT, [1, 2, 3, 9]) == (1, other)
    assert index.take_tail(ROOT, [1, 2, 3, 9]) == (0, {})
    assert all(pool.idle == 0 and not pool.indexed(longer[span]) for span, pool in pools.items())


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning():
    cache = KvCache({0: 6}, context=640)
    old = cache.sequence([1] * (4 * PAGE + 9))
    compute(cache, old)
    old.free()
    new = cache.sequence([2] * (3 * PAGE))  # one page is free; the tail and the fourth page of the old one go
    compute(cache, new)
    again = cache.sequence(old.tokens)
    assert again.match() == 3 * PAGE


# ---- sequences


@pytest.mark.parametrize("groups", [{0: 40}, {0: 40, 128: 20}, {100: 9}])
@pytest.mark.parametrize("length", [30, PAGE, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 5])
def test_the_next_turn_of_a_chat_computes_its_own_tokens_only(groups, length):
    cache = KvCache(groups, context=640)
    turn = cache.sequence(range(length))
    compute(cache, turn)
    turn.free()
    following = cache.sequence([*range(length), 7, 8, 9])
    assert following.match() == length
    compute(cache, following)
    # the tail was taken: another conversation finds the complete pages
    assert cache.sequence([*range(length), 1]).match() == length // PAGE * PAGE


@pytest.mark.parametrize("length", [30, PAGE, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 5])
def test_the_next_turn_begins_with_the_state_of_the_last_one(length):
    cache = KvCache({0: 40, STATE: 8}, context=640)
    turn = cache.sequence(range(length))
    prefill(cache, turn)
    turn.free()
    following = cache.sequence([*range(length), 7, 8, 9])
    assert following.match() == length
    prefill(cache, following)
    # a message before was edited: the prompt's last edge of a page has a state
    edge = (length - 1) // PAGE * PAGE
    assert cache.sequence([*range(edge), 1, 2]).match() == edge


def test_states_are_kept_every_so_often_and_few_of_them():
    cache = KvCache({0: 40, STATE: 5}, context=40 * PAGE)
    sequence = cache.sequence([1])
    for token in range(3 * SNAPSHOTS):
        prefill(cache, sequence)
        sequence.append([token])
    assert cache.cells and cache.cells.idle + 1 + cache.cells.free == 5 and cache.cells.idle >= 2
    sequence.truncate(2 * SNAPSHOTS + 100)
    assert sequence.computed == 2 * SNAPSHOTS


def test_what_a_failed_step_overwrote_is_computed_again():
    cache = KvCache({0: 40, STATE: 8}, context=640)
    sequence = cache.sequence([5] * (2 * PAGE + 20))
    prefill(cache, sequence)
    sequence.append([6])
    assert sequence.reserve(1)
    sequence.abandon()  # it had not begun
    assert sequence.computed == 2 * PAGE + 20
    assert sequence.reserve(1)
    cache.assign_slots([sequence])
    sequence.abandon()
    assert sequence.computed == 2 * PAGE


def test_no_more_sequences_than_cells():
    cache = KvCache({0: 40, STATE: 2}, context=640)
    first, second, third = (cache.sequence([i] * 9) for i in range(3))
    assert cache.has_room([first, second]) and not cache.has_room([first, second, third])
    assert first.reserve(9) and second.reserve(9) and not third.reserve(9) and third.room == 0
    second.free()
    assert third.reserve(9)


def test_going_back_computes_at_most_one_page_again():
    cache = KvCache({0: 40}, context=640)
    sequence = cache.sequence([5] * (2 * PAGE + 20))
    compute(cache, sequence)
    sequence.truncate(2 * PAGE + 3)  # in the page that it alone has
    assert sequence.computed == 2 * PAGE + 3
    sequence.truncate(2 * PAGE)
    assert sequence.computed == 2 * PAGE
    sequence.truncate(PAGE + 60)
    assert sequence.computed == PAGE
    with pytest.raises(ValueError, match="cannot keep"):
        sequence.truncate(PAGE + 61)


def test_going_back_behind_a_window_keeps_what_is_still_there():
    cache = KvCache({0: 10, PAGE: 5}, context=640)
    sequence = cache.sequence([5] * (5 * PAGE))
    for _ in range(5):
        compute(cache, sequence, PAGE)
    assert sequence.pages[PAGE] == [RELEASED] * 4 + sequence.pages[PAGE][4:]
    back = cache.sequence(sequence.tokens)
    back.match()
    back.truncate(2 * PAGE + 3)
    assert back.computed == 2 * PAGE  # the index has the window still
    back.free()
    other = cache.sequence([6] * (4 * PAGE))  # takes all other pages of the windowed group
    compute(cache, other)
    sequence.truncate(2 * PAGE + 3)
    assert sequence.computed == 0


def test_equal_pages_that_were_computed_twice_become_one():
    cache = KvCache({0: 10, 100: 10}, context=640)
    sequences = [cache.sequence([3] * (2 * PAGE + 1)) for _ in range(3)]
    for sequence in sequences:
        assert sequence.reserve(sequence.pending)
    cache.changed()
    for sequence in sequences:
        cache.assign_slots([sequence])
        sequence.advance(sequence.pending)
    assert cache.pools[0].available == 10 - 2 - 3
    assert cache.changed() == {0, 100} and cache.changed() == set()
    assert all((cache.page_tables[0][s.slot, :3] == s.pages[0]).all() for s in sequences)


def test_tokens_that_others_computed_meanwhile_are_taken():
    cache = KvCache({0: 10}, context=640)
    slow, quick = (cache.sequence([3] * (3 * PAGE)) for _ in range(2))
    compute(cache, slow, 10)
    compute(cache, quick)
    assert slow.match() == 2 * PAGE and cache.pools[0].available == 7


def test_a_step_has_slots_and_takes_those_of_the_longest_unused():
    cache = KvCache({0: 10}, context=640, slots=2)
    a, b, c = (cache.sequence([i]) for i in range(3))
    for s in (a, b, c):
        assert s.reserve(1)
    cache.assign_slots([a])
    cache.assign_slots([b])
    cache.assign_slots([a, c])
    assert (a.slot, b.slot, c.slot) == (0, None, 1)
    assert cache.page_tables[0][:, 0].tolist() == [a.pages[0][0], c.pages[0][0]]
    a.free()
    assert a.slot is None
    cache.assign_slots([b])
    assert (b.slot, c.slot) == (0, 1)
    with pytest.raises(ValueError, match="3 sequences"):
        cache.assign_slots([a, b, c])


def test_the_longest_sequence():
    assert KvCache({0: 9}, context=640).longest == 9 * PAGE
    assert KvCache({0: 99}, context=640).longest == 640
    assert KvCache({0: 9, 128: 3}, context=640).longest == 9 * PAGE
    assert KvCache({0: 9, 128: 2}, context=640).longest == 2 * PAGE
    assert [seen_pages(span) for span in (1, 2, 64, 65, 66)] == [1, 2, 2, 2, 3]
    with pytest.raises(ValueError, match="position 640 is beyond the context"):
        KvCache({0: 9}, context=640).sequence().reserve(641)


def test_a_sequence_reserves_up_to_the_context_and_in_all_groups_or_none():
    cache = KvCache({0: 3, 100: 2}, context=2 * PAGE)
    sequence = cache.sequence([1] * (2 * PAGE))
    assert sequence.reserve(2 * PAGE) and sequence.room == 2 * PAGE
    other = cache.sequence([2])
    assert not other.reserve(1) and cache.pools[0].available == 1 and cache.usage == (2, 2)
    with pytest.raises(ValueError, match="position 128 is beyond the context of 128"):
        sequence.reserve(2 * PAGE + 1)


def test_pages_that_several_sequences_began_with_are_kept_longer():
    cache = KvCache({100: 7}, context=1280)
    first = cache.sequence([1] * (3 * PAGE))
    compute(cache, first)
    shared = first.pages[100][1]
    second = cache.sequence([1] * (2 * PAGE) + [2] * (6 * PAGE))
    assert second.match() == 2 * PAGE
    first.free()
    compute(cache, second, PAGE)
    own = second.pages[100][2]
    compute(cache, second, 2 * PAGE)  # with both pages complete
    pool = cache.pools[100]
    assert pool.indexed(shared) and pool.indexed(own) and pool.holders(shared) == pool.holders(own) == 0
    order = [pool.allocate() for _ in range(pool.available)]
    assert order.index(own) < order.index(shared)
