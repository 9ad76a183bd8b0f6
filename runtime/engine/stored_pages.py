"""The parts of an engine's KV cache that are on disk: the shared cache on disk, and sequences in their own files."""

from collections.abc import Hashable, Iterator
from pathlib import Path

import numpy as np

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.page_files import PageFiles, PageKeys, PageSource
from mlc_amd.runtime.cache.pages import PAGE, STATE
from mlc_amd.runtime.cache.prefixes import ROOT, PrefixDigest, digest
from mlc_amd.runtime.cache.saved_pages import SavedPages, SavedSize, write_saved
from mlc_amd.runtime.cache.sequence import RELEASED
from mlc_amd.runtime.cache.sequence import Sequence as TokenSequence
from mlc_amd.runtime.engine.page_writer import PageWriter
from mlc_amd.runtime.engine.restoring import Restoring
from mlc_amd.runtime.engine.step_loop import StepLoop
from mlc_amd.runtime.images.rows import Prompt


class StoredPages:
    """The stored pages of one engine. Several threads may use it."""

    def __init__(self, artifact: Artifact, device, cache: KvCache, loop: StepLoop) -> None:
        self._artifact, self._device, self._cache, self._loop = artifact, device, cache, loop
        self._keys = PageKeys(artifact.manifest, device, cache.page_tables)
        self._files: PageFiles | None = None
        self._writer: PageWriter | None = None
        self._opened: dict[Hashable, SavedPages] = {}
        self._sources: list[PageSource] = []
        self._restoring = Restoring(cache, device, self._keys, self._sources)
        loop.restore_with(self._restoring)

    def keep_on_disk(self, limit: int) -> None:
        """See `LogitsEngine.keep_on_disk`. limit: bytes of the files of all models."""
        about = {"name": self._artifact.manifest["name"], "path": str(self._artifact.path.resolve())}
        self._files = PageFiles(self._keys.model, about, limit)
        self._writer = PageWriter(self._loop, self._cache, self._device, self._keys, self._files)
        self._find_in()

    @property
    def on_disk(self) -> bool:
        """Whether `keep_on_disk` was called."""
        return self._writer is not None

    def close(self) -> None:
        """Writes the pages that are not written yet."""
        if self._writer:
            self._writer.close()
        self._restoring.close()

    # ---- sequences in files of their own

    def save(self, tokens: Prompt, path: Path) -> SavedSize:
        """Writes a file with the cached pages of a sequence of these tokens. Raises UserError if that fails."""
        with self._loop.exclusive():
            sequence = self._held(tokens)
            snapshot = self._snapshot(sequence)
            pages = snapshot + self._pages(sequence)
        try:
            parts = {span: self._device.page_parts(span) for span in self._cache.page_tables}
            sizes = {span: sum(nbytes for _, nbytes in of) for span, of in parts.items()}
            keys = [(self._keys.of(known, span), sizes[span]) for known, span, _ in pages]
            return write_saved(path, self._keys.model, sequence.computed, keys, self._contents(pages))
        finally:
            with self._loop.exclusive():
                sequence.free()
                for _, span, cell in snapshot:
                    self._cache.index.pools[span].release(cell)

    def open(self, owner: Hashable, path: Path) -> SavedSize:
        """Adds a saved file to the places where pages are searched; it replaces the file that was opened for `owner`
        before. Raises UserError if it is not a file of this model."""
        self._opened[owner] = found = SavedPages(path, self._keys.model)
        self._find_in()
        return found.size

    def erase(self, owner: Hashable, tokens: Prompt) -> None:
        """Removes the pages of a sequence of these tokens from the cache, unless others use them, and from the cache on
        disk. Closes the file that is open for `owner`."""
        self._opened.pop(owner, None)
        self._find_in()
        with self._loop.exclusive():
            sequence = self._held(tokens)
            chain = [ROOT, *sequence.chain(len(tokens) // PAGE)]
            sequence.truncate(0)
            sequence.free()
            self._cache.index.remove(chain)
        if self._files:
            blocks = [(parent, tokens[i * PAGE : (i + 1) * PAGE]) for i, parent in enumerate(chain)]
            ends = [digest(parent, block[:n]) for parent, block in blocks for n in range(1, len(block) + 1)]
            self._files.remove(self._keys.of(known, span) for known in ends for span in self._cache.page_tables)

    def _find_in(self) -> None:
        with self._loop.exclusive():
            self._sources[:] = [*([self._files] if self._files else []), *self._opened.values()]

    def _held(self, tokens: Prompt) -> TokenSequence:
        """A sequence that holds the pages that the index has of these tokens."""
        sequence = self._cache.sequence(Prompt([*tokens, 0], tokens.images))
        sequence.match()
        return sequence

    def _pages(self, sequence: TokenSequence) -> list[tuple[PrefixDigest, int, int]]:
        """(digest, span, page) of each page that a sequence holds."""
        complete, rest = divmod(sequence.computed, PAGE)
        chain = list(sequence.chain(complete))
        if rest:
            begin = complete * PAGE
            chain.append(digest(chain[-1] if chain else ROOT, sequence.tokens[begin : sequence.computed]))
        found = [
            (known, span, page)
            for span, pages in sequence.pages.items()
            for known, page in zip(chain, pages, strict=False)
            if page != RELEASED
        ]
        if sequence.state and sequence.state.cell is not None:
            found.append((chain[-1], STATE, sequence.state.cell))
        return found

    def _snapshot(self, sequence: TokenSequence) -> list[tuple[PrefixDigest, int, int]]:
        """For a model with states: the last indexed state at the end of a page, other than the sequence's own, as
        (digest, STATE, cell), or nothing; useful for other prompts with a common beginning. Retains its cell."""
        index = self._cache.index
        for known in reversed(sequence.chain(sequence.computed // PAGE) if sequence.state else []):
            cell = index.page(known, STATE)
            if cell is not None and sequence.state and cell != sequence.state.cell:
                index.pools[STATE].retain(cell)
                return [(known, STATE, cell)]
        return []

    def _contents(self, pages: list[tuple[PrefixDigest, int, int]]) -> Iterator[np.ndarray]:
        for _, span, page in pages:
            with self._loop.exclusive():
                contents = self._device.read_pages(span, [page])[0]
            yield contents
