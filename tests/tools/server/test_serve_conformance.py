"""The answers against the published schemas of three APIs, by a tool that has them (pip install llm-comply)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llm_comply")
# What this server does otherwise by design: it takes no images, and needs no name of a model. The bundled model does
# not decide by itself to end its calls of tools.
OTHERWISE = ("image-input", "error-handling", "anth-tool-calling")


@pytest.mark.parametrize("form", ["openai-chat", "anthropic", "open-responses"])
def test_answers_have_all_that_the_schemas_of_their_api_want(served, form):
    where = ["-u", f"{served.url}/v1", "-m", "demo", "-k", "-"]
    command = [Path(sys.executable).with_name("llm-comply"), *where, "--json", "--format", form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    results = json.loads(done.stdout)["results"]
    failed = {one["id"]: one["errors"] for one in results if one["status"] == "failed"}
    assert {id: errors for id, errors in failed.items() if not id.endswith(OTHERWISE)} == {}
    assert sum(one["status"] == "passed" for one in results) >= 5
