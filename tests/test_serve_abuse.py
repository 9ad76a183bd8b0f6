"""A server under abuse beside a client that behaves (tools/dev/server_abuse.py): a short run of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from mlc_amd.tools.dev.server_abuse import abuse

SECONDS = 30


@pytest.mark.full
def test_abuse_harms_nobody(demo_artifact, tmp_path):
    log, mlc_amd = tmp_path / "log", Path(sys.executable).with_name("mlc-amd")
    command = [str(mlc_amd), "serve", str(demo_artifact), "--port", "0", "--kv-tokens", "8192", "--quiet"]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stderr=file, env=os.environ | {"MLC_AMD_API_KEY": ""}) as made,
    ):
        try:
            while "serving " not in log.read_text():
                assert made.poll() is None, log.read_text()
                time.sleep(0.1)
            url = log.read_text().split(" at ")[-1].split()[0]
            assert not abuse(url, made.pid, SECONDS)
        finally:
            made.kill()
    assert "Traceback" not in log.read_text()
