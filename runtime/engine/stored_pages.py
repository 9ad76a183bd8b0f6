"""What an engine keeps of its cache outside of memory: the cache on disk, and sequences in files of their own."""

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
    """Of one engine; for several threads."""

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
        """limit: bytes of the files of all models."""
        about = {"name": self._artifact.manifest["name"], "path": str(self._artifact.path.resolve())}
        self._files = PageFiles(self._keys.model, about, limit)
        self._writer = PageWriter(self._loop, self._cache, self._device, self._keys, self._files)
        self._find_in()

    @property
    def on_disk(self) -> bool:
        """Whether `keep_on_disk` was called."""
        return self._writer is not None

    def close(self) -> None:
        """Writes what is not written yet."""
        if self._writer:
            self._writer.close()
        self._restoring.close()

    # ---- sequences in files of their own

    def save(self, tokens: Prompt, path: Path) -> SavedSize:
        """Writes the pages that are in memory of a sequence that begins with these tokens. UserError."""
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
        """From now on pages are also found in a saved file, in place of the one that was opened for that owner before.
        UserError for a file that is not one of this model."""
        self._opened[owner] = found = SavedPages(path, self._keys.model)
        self._find_in()
        return found.size

    def erase(self, owner: Hashable, tokens: Prompt) -> None:
        """Forgets what nobody uses of a sequence with these tokens, and the file that is open for that owner."""
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
        """A sequence that holds what the index has of these tokens."""
        sequence = self._cache.sequence(Prompt([*tokens, 0], tokens.images))
        sequence.match()
        return sequence

    def _pages(self, sequence: TokenSequence) -> list[tuple[PrefixDigest, int, int]]:
        """Those that a sequence holds: digest, span and page."""
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
        """The last one of a state at a page's end before that of the sequence, held: other prompts may begin there."""
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
