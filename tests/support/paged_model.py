"""A model of what the pages of a cache contain: every position of a page holds the chain of tokens that was computed
there, exactly, so that a key of a wrong token, or of the right token after wrong ones, is found."""

from collections.abc import Iterable, Iterator

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.pages import PAGE, STATE
from mlc_amd.runtime.cache.prefixes import first_page
from mlc_amd.runtime.cache.sequence import RELEASED, Sequence


def chains(tokens: Iterable[int], chain: int = 0) -> Iterator[int]:
    """Of the tokens after `chain`: a number for the first one, for the first two, .."""
    for token in tokens:
        chain = hash((chain, token))
        yield chain


def held_cells(sequence: Sequence) -> set[int]:
    """The cell of its state, and those that are reserved for the next step."""
    return sequence.state.held if sequence.state else set()


class PagedModel:
    """Takes the place of a device: `run` writes and reads pages as a step does."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self.contents = {span: [[0] * PAGE for _ in range(pool.pages)] for span, pool in cache.pools.items()}
        self.states = [0] * (cache.cells.pages if cache.cells else 0)  # the chain of each cell's state

    def run(self, sequence: Sequence, count: int, drafts: Iterable[int] = ()) -> list[int]:
        """The next `count` tokens of a sequence with pages and a slot, and drafts after them: writes their chains, and
        reads what the rows of the first and the last one see. Returns their chains."""
        tokens = [*sequence.tokens[: sequence.computed + count], *drafts]
        begin, end = sequence.computed, len(tokens)
        assert sequence.computed + count <= len(sequence.tokens) and sequence.slot is not None
        own = list(chains(tokens))
        if self.cache.cells:
            source, *targets = self.cache.page_tables[STATE][sequence.slot].tolist()
            assert not begin or self.states[source] == own[begin - 1]
            assert source not in targets[: len(tokens) - begin - 1] or not drafts
            assert all(self.cache.cells.holders(cell) == 1 and not self.cache.cells.indexed(cell) for cell in targets)
            for cell, chain in zip(targets, own[begin + count - 1 :], strict=False):
                self.states[cell] = chain
        for span, pool in self.cache.pools.items():
            table = self.cache.page_tables[span][sequence.slot]
            for position in range(begin, end):
                page = int(table[position // PAGE])
                assert pool.holders(page) == 1 and not pool.indexed(page), "a page is written that is shared or indexed"
                self.contents[span][page][position % PAGE] = own[position]
            for last in (begin, end - 1):
                first = max(last - span + 1, 0) if span else 0
                pages = [self.contents[span][page] for page in table[first // PAGE : last // PAGE + 1].tolist()]
                seen = [chain for page in pages for chain in page][first % PAGE :]
                assert seen[: last - first + 1] == own[first : last + 1], (span, last)
        return own[begin:]

    def check(self, sequences: list[Sequence]) -> None:
        """All that is true between two steps when these are the cache's sequences."""
        pools = self.cache.pools | ({STATE: self.cache.cells} if self.cache.cells else {})
        holders = {span: [0] * pool.pages for span, pool in pools.items()}
        for sequence in sequences:
            assert 0 <= sequence.computed <= len(sequence.tokens)
            own = list(chains(sequence.tokens))
            if sequence.state and sequence.state.cell is not None:
                assert self.states[sequence.state.cell] == own[sequence.computed - 1]
            for cell in held_cells(sequence):
                holders[STATE][cell] += 1
            for span, pages in sequence.pages.items():
                first = first_page(span, sequence.computed // PAGE)
                assert all((page == RELEASED) == (i < first) for i, page in enumerate(pages))
                assert len(pages) * PAGE >= sequence.computed
                for i, page in enumerate(pages[first:], first):
                    holders[span][page] += 1
                    known = own[i * PAGE : min((i + 1) * PAGE, sequence.computed)]
                    assert self.contents[span][page][: len(known)] == known
                    if len(known) < PAGE:
                        assert not self.cache.pools[span].indexed(page)
        for span, pool in pools.items():
            assert [pool.holders(page) for page in range(pool.pages)] == holders[span]
            assert pool.available == holders[span].count(0)
            assert self.cache.page_tables[span].min() >= 0 and self.cache.page_tables[span].max() < pool.pages
