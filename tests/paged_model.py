"""A model of what the pages of a cache contain: every position of a page holds the chain of tokens that was computed
there, exactly, so that a key of a wrong token, or of the right token behind wrong ones, is found."""

from mlc_amd.runtime.kv_cache import Cache
from mlc_amd.runtime.pages import PAGE
from mlc_amd.runtime.prefixes import first_page
from mlc_amd.runtime.sequence import GONE, Sequence


class Chains:
    """Numbers for sequences of tokens: equal numbers, equal sequences."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def extend(self, chain: int, tokens: list[int]) -> list[int]:
        """Of `chain` and the first token, the first two, ..; chain 0 has no tokens."""
        numbers = []
        for token in tokens:
            chain = self._numbers.setdefault((chain, token), len(self._numbers) + 1)
            numbers.append(chain)
        return numbers


class PagedModel:
    """Takes the place of a device: `run` writes and reads pages as a step does."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.chains = cache, Chains()
        self.contents = {span: [[0] * PAGE for _ in range(pool.pages)] for span, pool in cache.pools.items()}

    def run(self, sequence: Sequence, count: int) -> int:
        """The next `count` tokens of a sequence with pages and a slot. Returns the chain of the last one, as the row of
        that token sees it."""
        begin, end = sequence.computed, sequence.computed + count
        assert end <= len(sequence.tokens) and sequence.slot is not None
        before = self.read(sequence, 0, begin - 1) if begin else 0
        for position, chain in enumerate(self.chains.extend(before, sequence.tokens[begin:end]), begin):
            for span, pool in self.cache.pools.items():
                page = int(self.cache.page_tables[span][sequence.slot, position // PAGE])
                assert pool.holders(page) == 1 and not pool.indexed(page), "a page is written that is shared or indexed"
                self.contents[span][page][position % PAGE] = chain
        for position in (begin, end - 1):
            for span in self.cache.pools:
                self.check_seen(sequence, span, position)
        return self.read(sequence, next(iter(self.cache.pools)), end - 1)

    def read(self, sequence: Sequence, span: int, position: int) -> int:
        span = span if span in self.cache.pools else next(iter(self.cache.pools))
        return self.contents[span][self.cache.page_tables[span][sequence.slot, position // PAGE]][position % PAGE]

    def check_seen(self, sequence: Sequence, span: int, position: int) -> None:
        """The keys that the row of `position` sees are those of its own tokens."""
        chains = self.chains.extend(0, sequence.tokens[: position + 1])
        for seen in range(max(position - span + 1, 0) if span else 0, position + 1):
            assert self.read(sequence, span, seen) == chains[seen], (span, position, seen)

    def check(self, sequences: list[Sequence]) -> None:
        """All that is true between two steps when these are the cache's sequences."""
        holders = {span: [0] * pool.pages for span, pool in self.cache.pools.items()}
        for sequence in sequences:
            assert 0 <= sequence.computed <= len(sequence.tokens)
            chains = self.chains.extend(0, sequence.tokens)
            for span, pages in sequence.pages.items():
                first = first_page(span, sequence.computed // PAGE)
                assert all((page == GONE) == (i < first) for i, page in enumerate(pages))
                assert len(pages) * PAGE >= sequence.computed
                for i, page in enumerate(pages[first:], first):
                    holders[span][page] += 1
                    known = chains[i * PAGE : min((i + 1) * PAGE, sequence.computed)]
                    assert self.contents[span][page][: len(known)] == known
                    if len(known) < PAGE:
                        assert not self.cache.pools[span].indexed(page)
        for span, pool in self.cache.pools.items():
            assert [pool.holders(page) for page in range(pool.pages)] == holders[span]
            assert pool.available == holders[span].count(0)
            assert self.cache.page_tables[span].min() >= 0 and self.cache.page_tables[span].max() < pool.pages
