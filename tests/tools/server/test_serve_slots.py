"""llama-server's slots: saved, restored and erased, with the bundled model."""

from functools import partial

import pytest
from servers.serving import serving

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import RunOptions
from mlc_amd.tools.server.library import Library

PROMPT = "def join(a, b):\n" * 30
OTHER = "class Point:\n" * 30


@pytest.fixture
def serve(demo_artifact, tmp_path):
    """Servers of one folder; the model and its context leave room for one of both prompts."""
    load = partial(Engine.load, demo_artifact, RunOptions(threads=2))
    return lambda: serving(Library({"demo": load}), slot_save_path=str(tmp_path))


def complete(server, prompt=PROMPT, **fields) -> tuple[str, int]:
    """The text, and the tokens of the prompt that were computed."""
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "cache_prompt": True, **fields}
    found = server.post("/completion", body)
    return found["content"], found["timings"]["prompt_n"]


def test_a_slot_survives_a_restart(serve, tmp_path):
    with serve() as server:
        text, whole = complete(server, id_slot=1)
        saved = server.post("/slots/1?action=save", {"filename": "one.bin"})
        assert saved["id_slot"] == 1 and saved["filename"] == "one.bin" and saved["n_saved"] == whole + 7
        assert saved["n_written"] == (tmp_path / "one.bin").stat().st_size and saved["timings"]["save_ms"] > 0
        assert (tmp_path / "one.bin").stat().st_mode & 0o777 == 0o600
    with serve() as server:
        restored = server.post("/slots/0?action=restore", {"filename": "one.bin"})
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        assert complete(server, PROMPT + text + "\n")[1] < 64 < whole


def test_an_erased_slot_is_computed_again(serve):
    with serve() as server:
        text, whole = complete(server)
        assert complete(server)[1] < whole
        assert server.post("/slots/0?action=erase", {})["n_erased"] == whole + 7
        assert complete(server) == (text, whole)
        other = complete(server, OTHER, id_slot=2)
        server.post("/slots/0?action=erase", {})
        assert complete(server, OTHER, id_slot=2)[1] < other[1]  # the other slot stays


def test_what_cannot_be_done(serve, served, tmp_path):
    (tmp_path / "bad.bin").write_bytes(b"mlcpage1 and nothing else" * 9)
    with serve() as server:
        for path, body, status in (
            ("/slots/0?action=save", {"filename": "x"}, 400),  # no answer yet
            ("/slots/0?action=restore", {"filename": "bad.bin"}, 400),
            ("/slots/0?action=restore", {"filename": "none.bin"}, 400),
            ("/slots/0?action=restore", {"filename": "../x"}, 400),
            ("/slots/0?action=restore", {"filename": ".."}, 400),
            ("/slots/0?action=restore", {"filename": "\U0001f600" * 100}, 400),
            ("/slots/0?action=restore", {"filename": ["x"]}, 400),
            ("/slots/0?action=restore", {"filename": "\ud800"}, 400),
            ("/slots/0?action=restore", {}, 400),
            ("/slots/0?action=move", {}, 400),
            ("/slots/0", {}, 400),
            ("/slots/5000?action=erase", {}, 400),
            ("/slots/x?action=erase", {}, 404),
            ("/slots/0?action=erase&model=none", {}, 404),
            ("/completion", {"prompt": "x", "id_slot": 5000}, 400),
        ):
            assert server.request(path, body)[0] == status, path
    assert served.request("/slots/0?action=erase", {})[0] == 501


def test_a_model_that_made_room_finds_its_cache(demo_artifact, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = partial(Engine.load, demo_artifact, RunOptions(threads=2, cache_disk="1G"))
    with serving(Library({"one": load, "two": load}, most=1)) as server:
        text, whole = complete(server, model="one")
        complete(server, OTHER, model="two")
        assert [*server.service.library.loaded] == ["two"]
        again, computed = complete(server, model="one")
        assert again == text and computed <= 64 < whole
