"""A server under abuse beside a client that behaves (tests/dev/fuzz/server_abuse.py): a short run of it."""

import pytest

pytest.importorskip("starlette")
from servers.serving import started

from tests.dev.fuzz.server_abuse import abuse

SECONDS = 30


@pytest.mark.full
def test_abuse_harms_nobody(demo_artifact, tmp_path):
    with started(demo_artifact, "--kv-tokens", "8192", "--quiet", log=tmp_path / "log") as served:
        assert not abuse(served.url, served.process.pid, SECONDS)
    assert "Traceback" not in served.log.read_text()
