"""What an engine keeps of its cache outside of memory: the cache on disk, and saved sequences."""

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.page_files import PageFiles, PageKeys, PageSource
from mlc_amd.runtime.engine.page_writer import PageWriter
from mlc_amd.runtime.engine.restoring import Restoring
from mlc_amd.runtime.engine.step_loop import StepLoop


class StoredPages:
    """Of one engine."""

    def __init__(self, artifact: Artifact, device, cache: KvCache, loop: StepLoop) -> None:
        self._artifact, self._device, self._cache, self._loop = artifact, device, cache, loop
        self._keys = PageKeys(artifact.manifest, device, cache.page_tables)
        self._sources: list[PageSource] = []
        self._restoring = Restoring(cache, device, self._keys, self._sources)
        self._writer: PageWriter | None = None
        loop.restore_with(self._restoring)

    def keep_on_disk(self, limit: int) -> None:
        """limit: bytes of the files of all models."""
        about = {"name": self._artifact.manifest["name"], "path": str(self._artifact.path.resolve())}
        files = PageFiles(self._keys.model, about, limit)
        self._sources.append(files)
        self._writer = PageWriter(self._loop, self._cache, self._device, self._keys, files)

    def close(self) -> None:
        """Writes what is not written yet."""
        self._restoring.close()
        if self._writer:
            self._writer.close()
