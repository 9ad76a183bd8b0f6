"""Models of a hub: download, cache and errors, against a server of the hub's API on this machine."""

import contextlib
import importlib
import os
import pty
import random
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
from filelock import FileLock
from huggingface_hub import constants
from servers.hub_server import COMMIT, Hub, sha256

from mlc_amd.tools import cli
from mlc_amd.tools.hub import hub, hub_files, models

REPO = "someone/Model-GGUF"
SMALL, OTHER = (random.Random(seed).randbytes(300_000) for seed in (1, 2))
PARTS = {f"BF16/x-BF16-0000{number}-of-00002.gguf": SMALL[number:] for number in (1, 2)}
FILES = {"x-Q4_K_M.gguf": SMALL, "x-Q8_0.gguf": OTHER, "README.md": b"#", **PARTS}


def environment(hub: Hub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The hub that huggingface_hub, whose module of constants reads the environment, speaks with in this process."""
    with Hub({REPO: dict(FILES)}) as hub, monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
            patch.delenv(name)
        for name, value in environment(hub, tmp_path / "hf").items():
            patch.setenv(name, value)
        importlib.reload(constants)
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what a broken connection may lose
        yield hub
    huggingface_hub.close_session()
    importlib.reload(constants)


@pytest.fixture
def pull(server, capsys):
    """pull(name) -> (exit code, stdout, stderr)."""

    def run(*tokens: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["pull", *tokens])
        return code, *capsys.readouterr()

    return run


def blobs(suffix: str = "") -> list[Path]:
    return [path for path in hub.cache().glob("models--*/blobs/*") if path.name.endswith(suffix)]


def error_of(result: tuple[int, str, str]) -> str:
    """A command's error: one line on stderr, after the line that tells of the download; nothing on stdout."""
    code, out, err = result
    *before, last = err.splitlines()
    assert (code, out) == (1, "") and last.startswith("error: "), err
    assert all(line.startswith("downloading ") for line in before)
    return last


def test_a_model_is_downloaded_once(server, pull):
    code, out, err = pull(REPO)
    path = Path(out.removesuffix("\n"))
    assert (code, err) == (0, f"downloading x-Q4_K_M.gguf (292.97 KiB) from {REPO} ...\n")
    assert path.name == "x-Q4_K_M.gguf" and path.read_bytes() == SMALL
    assert path.parent == hub.cache() / "models--someone--Model-GGUF" / "snapshots" / COMMIT
    assert [blob.name for blob in blobs()] == [sha256(SMALL)]
    assert pull(f"{REPO}:q4_k_m") == (0, out, "") and server.downloads() == [None]
    # The cache is the one that other programs of the hub use.
    assert huggingface_hub.try_to_load_from_cache(REPO, "x-Q4_K_M.gguf") == str(path)


def test_all_parts_are_downloaded(pull):
    code, out, _ = pull(f"{REPO}:BF16")
    first = Path(out.strip())
    assert code == 0 and first.name == "x-BF16-00001-of-00002.gguf"
    assert {f"BF16/{path.name}": path.read_bytes() for path in first.parent.iterdir()} == PARTS


def test_the_image_encoder_comes_along(server, pull):
    server.repos[REPO] |= {"mmproj-F32.gguf": OTHER[1:], "mmproj-F16.gguf": OTHER[2:], "BF16/mmproj-x.gguf": OTHER[3:]}
    path = Path(pull(f"{REPO}:Q4_K_M")[1].strip())
    assert (path.parent / "mmproj-F16.gguf").read_bytes() == OTHER[2:]
    assert not (path.parent / "mmproj-F32.gguf").exists()
    path = Path(pull(f"{REPO}:BF16")[1].strip())
    assert (path.parent / "mmproj-x.gguf").read_bytes() == OTHER[3:]


def test_the_image_encoder_may_be_left_out(server, pull):
    server.repos[REPO]["mmproj-F16.gguf"] = OTHER[2:]
    path = Path(pull(f"{REPO}:Q4_K_M", "--no-mmproj")[1].strip())
    assert not (path.parent / "mmproj-F16.gguf").exists()


def test_a_small_file_may_be_in_git_itself(server, pull):
    server.plain.add("x-Q4_K_M.gguf")
    code, out, _ = pull(REPO)
    assert code == 0 and Path(out.strip()).read_bytes() == SMALL


def test_a_file_that_is_too_large_for_http(pull, monkeypatch):
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 1000)
    assert "too large" in error_of(pull(REPO)) and blobs() == []


def test_two_processes_download_a_file_once(server, pull):
    place = hub.cache() / ".locks" / "models--someone--Model-GGUF" / f"{sha256(SMALL)}.lock"
    place.parent.mkdir(parents=True)
    other = FileLock(place, thread_local=False)
    other.acquire()
    release = threading.Timer(2 * hub._PATIENCE, other.release)
    release.start()
    code, out, err = pull(REPO)
    release.join()
    assert code == 0 and Path(out.strip()).read_bytes() == SMALL
    assert err.startswith("waiting for another process, which downloads x-Q4_K_M.gguf\ndownloading ")


def test_the_list(pull):
    code, out, _ = pull("--list", REPO)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["quant", "size", "files", "name"],
        ["BF16", "585.93", "KiB", "2", "BF16/x-BF16"],
        ["Q4_K_M", "292.97", "KiB", "1", "x-Q4_K_M"],
        ["Q8_0", "292.97", "KiB", "1", "x-Q8_0"],
    ]
    assert pull("--list", f"{REPO}:q8_0")[1].split() == [*out.split()[:4], *out.split()[-5:]]
    assert "has no Q2_K; it has BF16" in error_of(pull("--list", f"{REPO}:Q2_K"))


def test_other_commands_take_what_is_in_the_cache(server, pull):
    pull(f"{REPO}:Q8_0")
    asked = len(server.log)
    assert models.find(f"{REPO}:q8_0").read_bytes() == models.find(REPO).read_bytes() == OTHER
    assert len(server.log) == asked  # without a question to the hub
    assert models.find(f"{REPO}:Q4_K_M").read_bytes() == SMALL


def test_a_name_stands_for_a_file_in_commands(server, demo_gguf, capsys):
    server.repos["me/Demo-GGUF"] = {"demo-Q4_K_M.gguf": demo_gguf.read_bytes()}
    assert cli.main(["tokenize", "me/Demo-GGUF:Q4_K_M", "def f", "--ids-only"]) == 0
    of_name = capsys.readouterr().out
    assert cli.main(["tokenize", str(demo_gguf), "def f", "--ids-only"]) == 0
    assert of_name == capsys.readouterr().out
    path = models.find("me/Demo-GGUF")
    assert models.source_path("me/Demo-GGUF", None) == path
    assert cli.main(["inspect", "me/Demo-GGUF"]) == 0
    assert f"file          {path}\n" in capsys.readouterr().out


def test_a_local_path_of_that_name_wins(server, demo_gguf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / REPO
    place.parent.mkdir()
    place.symlink_to(demo_gguf)
    assert models.find(REPO) == Path(REPO) and not server.log


def test_a_path_that_is_no_model_of_the_hub_either(server, capsys):
    assert cli.main(["inspect", "dist/modle"]) == 1
    assert f"dist/modle: no such file or folder here; {server.endpoint} has no model" in capsys.readouterr().err


# ---- broken connections, damage


def test_a_broken_connection_is_continued_by_the_next_call(server, pull):
    server.cuts = [200_000]
    message = error_of(pull(REPO))
    assert "the connection broke at" in message and "the same command continues there" in message
    (partial,) = blobs()
    have = partial.stat().st_size
    assert partial.name.endswith(".incomplete") and 0 < have <= 200_000 and not list(hub.cache().rglob("*.gguf"))
    code, out, _ = pull(REPO)
    assert code == 0 and Path(out.strip()).read_bytes() == SMALL
    assert server.downloads() == [None, f"bytes={have}-"] and blobs(".incomplete") == []


def test_a_short_interruption_is_continued_at_once(server, pull):
    server.closes = [200_000]
    code, out, err = pull(REPO)
    assert code == 0 and Path(out.strip()).read_bytes() == SMALL and err.count("\n") == 1
    assert server.downloads() == [None, "bytes=200000-"]


def test_a_server_without_ranges_sends_all_again(server, pull):
    server.cuts, server.ranges = [200_000], False
    error_of(pull(REPO))
    code, out, _ = pull(REPO)
    assert code == 0 and Path(out.strip()).read_bytes() == SMALL


def test_what_another_program_left_may_be_too_long(server, pull):
    server.cuts = [200_000]
    error_of(pull(REPO))
    blobs()[0].write_bytes(SMALL + b"x")
    code, out, _ = pull(REPO)
    assert code == 0 and Path(out.strip()).read_bytes() == SMALL


@pytest.mark.parametrize(
    ("stored", "damage"),
    [(SMALL[:-1] + b"?", "another SHA-256 than announced"), (SMALL[:-9], "299991 bytes, not 300000")],
    ids=["hash", "size"],
)
def test_a_damaged_file_does_not_stay(server, pull, stored, damage):
    server.stored[sha256(SMALL)] = stored
    assert damage in error_of(pull(REPO))
    assert blobs() == [] and not list(hub.cache().rglob("*.gguf"))
    server.stored.clear()
    assert pull(REPO)[0] == 0


def test_a_part_is_missing(server, pull):
    del server.repos[REPO]["BF16/x-BF16-00002-of-00002.gguf"]
    assert "of the 2 parts of BF16/x-BF16, it lacks 2" in error_of(pull(f"{REPO}:BF16"))
    assert server.downloads() == []


def test_a_hash_becomes_a_name_of_a_file_only_if_it_is_one(server, monkeypatch):
    monkeypatch.setattr("servers.hub_server.sha256", lambda data: "../../../outside")
    assert {file.sha256 for model in hub.listing(REPO) for file in model.parts.values()} == {None}


def test_a_full_disk_is_noticed_before(server, pull, monkeypatch):
    usage = type("Usage", (), {"free": 299_999})
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    message = error_of(pull(REPO))
    assert "292.97 KiB free, the model needs 292.97 KiB more" in message and "HF_HUB_CACHE" in message
    assert server.downloads() == [] and blobs() == []


def test_a_full_disk_is_noticed_while_it_fills(pull):
    partial = hub.cache() / "models--someone--Model-GGUF" / "blobs" / f"{sha256(SMALL)}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.symlink_to("/dev/full")
    message = error_of(pull(REPO))
    assert "No space left on device" in message and "HF_HUB_CACHE" in message
    assert not list(hub.cache().rglob("*.gguf"))


def test_a_cache_that_cannot_be_written(pull, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/proc/nowhere")
    assert "/proc/nowhere" in error_of(pull(REPO))


# ---- access


def test_a_gated_model_needs_a_token(server, pull, monkeypatch):
    server.gated.add(REPO)
    message = error_of(pull(REPO))
    assert "is gated" in message and "HF_TOKEN" in message and f"{server.endpoint}/{REPO}" in message
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull(REPO)[0] == 0
    # The token is for the hub, not for the store that it redirects to.
    assert server.tokens and not [path for path, _ in server.tokens if path.startswith("/cdn/")]


def test_a_token_that_the_hub_does_not_know(pull, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = error_of(pull(REPO))
    assert "answers 401" in message and "does not know the token in HF_TOKEN" in message


@pytest.mark.parametrize(("status", "advice"), [(403, "HF_TOKEN"), (429, "wait"), (503, "try again later")])
def test_the_hub_refuses(server, pull, status, advice):
    server.status = status
    message = error_of(pull(REPO))
    assert f"answers {status}" in message and advice in message


def test_no_such_model(pull):
    message = error_of(pull("someone/None-GGUF"))
    assert "has no model someone/None-GGUF" in message and "HF_TOKEN" in message


def test_what_is_no_name(pull):
    assert "write OWNER/REPO or OWNER/REPO:QUANT" in error_of(pull("model.gguf"))


# ---- without a network


def test_without_a_network_the_cache_is_taken(server, pull):
    _, path, _ = pull(REPO)
    server.__exit__()
    huggingface_hub.close_session()
    code, out, err = pull(REPO)
    assert (code, out) == (0, path)
    assert f"cannot reach {server.endpoint}" in err and "x-Q4_K_M.gguf is taken from the cache" in err
    assert "cannot reach" in error_of(pull(f"{REPO}:Q8_0"))
    server.__enter__()


def test_offline_mode_asks_nobody(server, pull, monkeypatch):
    _, path, _ = pull(REPO)
    asked = len(server.log)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    importlib.reload(constants)
    assert pull(REPO)[:2] == (0, path)
    assert "HF_HUB_OFFLINE is set" in error_of(pull(f"{REPO}:Q8_0"))
    assert len(server.log) == asked


def test_the_command_reads_the_environment(server, tmp_path):
    server.gated.add(REPO)
    command = [str(Path(sys.executable).with_name("mlc-amd")), "pull", f"{REPO}:Q8_0"]
    variables = {**os.environ, **environment(server, tmp_path / "home"), "HF_TOKEN": server.token}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.removesuffix("\n"))
    assert path.is_relative_to(tmp_path / "home" / "hub") and path.read_bytes() == OTHER
    assert done.stderr == f"downloading x-Q8_0.gguf (292.97 KiB) from {REPO} ...\n"


def test_a_terminal_shows_the_progress(server, tmp_path):
    terminal, end = pty.openpty()
    command = [str(Path(sys.executable).with_name("mlc-amd")), "pull", REPO]
    variables = {**os.environ, **environment(server, tmp_path / "home"), "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    shown = b""
    with open(terminal, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := screen.read(4096):
            shown += piece
    out, _ = process.communicate(timeout=300)
    assert Path(out.decode().strip()).read_bytes() == SMALL
    assert all(word in shown.decode() for word in (f"from {REPO}", "download ", "verify ", "293.0/293.0 KiB"))


def test_a_local_file_does_not_wait_for_the_hub(demo_gguf):
    code = (
        "import sys; from mlc_amd.tools.hub import models; models.source_path(sys.argv[1], None); "
        "assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(demo_gguf)], timeout=300, check=True)


def test_what_was_downloaded_is_listed(pull, capsys, monkeypatch, tmp_path):
    """Whole models: of those whose download was interrupted, and of parts, there is nothing to use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))

    def listed() -> str:
        assert cli.main(["list"]) == 0
        out = capsys.readouterr().out
        assert cli.main(["ls"]) == 0
        assert capsys.readouterr().out == out
        return out

    assert listed() == f"{tmp_path}/own/mlc-amd/models: no models\n"
    for quant in ("Q4_K_M", "BF16"):
        assert pull(f"{REPO}:{quant}")[0] == 0
    expected = f"downloaded, in {hub.cache()}:\n  {REPO}:BF16 (585.93 KiB)\n  {REPO}:Q4_K_M (292.97 KiB)\n"
    assert listed().endswith(expected)
    assert hub.cached(hub_files.parse(f"{REPO}:BF16")).name == "x-BF16-00001-of-00002.gguf"
    (hub.cache() / "models--some--Empty").mkdir()
    (
        hub.cache() / "models--someone--Model-GGUF" / "snapshots" / COMMIT / "BF16" / "x-BF16-00002-of-00002.gguf"
    ).unlink()
    blobs()[0].with_name("half.incomplete").touch()
    assert listed().splitlines()[2:] == [f"  {REPO}:Q4_K_M (292.97 KiB)"]
