"""The GPUs of a model that was compiled for several by tensor, as CPU devices that compute one after the other."""

import numpy as np

from mlc_amd.runtime.artifact.ranks import rank_artifact, segments
from mlc_amd.runtime.devices.cpu import CpuDevice
from mlc_amd.runtime.devices.handover import spans


class CpuRanks:
    """See runtime/devices/__init__.py for the protocol."""

    def __init__(self, artifact):
        self.artifact = artifact
        self.ranks = [CpuDevice(rank_artifact(artifact, rank), 2) for rank in range(artifact.manifest["gpus"])]
        first = self.ranks[0]
        self.kind, self.name, self.threads, self.kv_types, self.waited = "cpu", first.name, 2, first.kv_types, 0.0

    def write(self, name, values):
        for rank in self.ranks:
            rank.write(name, values)

    def run(self, function, meanwhile=None):
        if meanwhile:
            meanwhile()
        host = np.zeros(0, np.uint8)
        for name in segments(self.ranks[0].artifact.manifest["functions"], function):
            sent = {}
            for rank in self.ranks:
                one = rank.artifact.manifest["functions"][name]
                for first, end, at in spans(one, "receives"):
                    rank.arena[first:end] = host[at : at + end - first]
                if "own" in one:
                    source, target, count = one["own"]
                    rank.arena[target : target + count] = rank.arena[source : source + count]
                rank.run(name)
                sent |= {at: rank.arena[first:end].copy() for first, end, at in spans(one, "sends")}
            host = np.concatenate([sent[at] for at in sorted(sent)]) if sent else host

    def can_start_ahead(self, function, late=False):
        return False

    def read(self, name, rows):
        """All hold the same, bit by bit."""
        found = [rank.read(name, rows) for rank in self.ranks]
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
        return found[0]

    def clear(self):
        for rank in self.ranks:
            rank.clear()

    def close(self):
        for rank in self.ranks:
            rank.close()
