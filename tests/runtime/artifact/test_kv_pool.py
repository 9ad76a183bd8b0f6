"""How large the KV cache is: by tokens, by memory, by what is left; and what limits it."""

import pytest

from mlc_amd.runtime import host
from mlc_amd.runtime.cache.cache_types import kv_bytes, kv_types
from mlc_amd.runtime.cache.kv_pool import ELEMENTS, ONE_SEQUENCE, KvSize
from mlc_amd.runtime.cache.pages import PAGE, STATE
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import RunOptions
from mlc_amd.tools import cli

CONTEXT, WIDTH = 8192, 1024


def manifest(window_pages=18, width=WIDTH):
    """A layer that sees all keys and one with a window, and a tensor that is no cache."""
    tensors = [("k.0", 0, CONTEXT // PAGE), ("v.0", 0, CONTEXT // PAGE), ("k.1", 512, window_pages)]
    kept = [{"name": name, "dtype": "float16", "shape": [pages, width // 128, PAGE, 128], "span": span}
            for name, span, pages in tensors]  # fmt: skip
    functions = {"decode": {"single": 1}, "mixed": {"single": 64}}
    return {
        "context": CONTEXT,
        "functions": functions,
        "kv": [*kept, {"name": "parts", "dtype": "float32", "shape": [100]}],
    }


def nbytes(pages):
    return kv_bytes(kv_types(manifest(), pages))


def test_tokens():
    assert ONE_SEQUENCE.pages(manifest()) == {0: 128, 512: 18} and KvSize.of() == ONE_SEQUENCE
    assert KvSize.of(tokens=4 * CONTEXT).pages(manifest()) == {0: 512, 512: 16 * 18}
    assert KvSize.of(tokens=65).pages(manifest()) == {0: 2, 512: 2}


def test_tokens_of_many_sequences():
    """Short ones need windows, and states, as often as long ones."""
    found = manifest()
    found["kv"].append({"name": "state", "dtype": "float32", "shape": [8, 16], "span": STATE})
    assert KvSize(tokens=32 * 640).pages(found) == {0: 320, 512: 10 * 18, STATE: 24}
    assert KvSize(tokens=32 * 640, sequences=32).pages(found) == {0: 320, 512: 320, STATE: 128}
    assert KvSize(tokens=9 * 2048, sequences=9).pages(found) == {0: 288, 512: 9 * 18, STATE: 72}
    pages = KvSize(memory=64 << 20, sequences=100).pages(manifest())
    assert pages[0] == pages[512] and nbytes(pages) <= 64 << 20


@pytest.mark.parametrize("text", ["64M", "64 MiB", "0.0625g", 64 << 20])
def test_memory(text):
    size = KvSize.of(memory=text)
    pages = size.pages(manifest())
    assert nbytes(pages) <= 64 << 20 < nbytes(KvSize.of(tokens=(pages[0] + 1) * PAGE).pages(manifest()))
    assert size.pages(manifest(), room=1) == pages  # ignores the free memory


def test_what_is_left():
    size = KvSize.of(memory="auto")
    assert size.pages(manifest(), room=nbytes({0: 40, 512: 36})) == {0: 40, 512: 36}
    assert size.pages(manifest(), room=1 << 50)[0] == 64 * CONTEXT // PAGE  # what the sequences of a step can use
    with pytest.raises(UserError, match="what the device has left is too small for a KV cache of 64 tokens"):
        size.pages(manifest(), room=-5)


@pytest.mark.parametrize("size", [KvSize.of(tokens=1 << 22), KvSize.of(memory="1T")])
def test_kernels_address_no_more_than_2_31_elements(size, caplog):
    pages = size.pages(manifest())
    assert pages[0] == ELEMENTS // (PAGE * WIDTH) < (1 << 22) // PAGE
    assert all(count * PAGE * WIDTH < 1 << 31 for count in pages.values())
    assert f"holds {pages[0] * PAGE} tokens and no more: kernels cannot address" in caplog.text


def test_the_driver_limits_a_tensor(caplog):
    assert ONE_SEQUENCE.pages(manifest(), largest=CONTEXT * WIDTH * 2) == {0: 128, 512: 18} and not caplog.text
    assert ONE_SEQUENCE.pages(manifest(), largest=40 * PAGE * WIDTH * 2 + 100) == {0: 40, 512: 36}
    assert "holds 2560 tokens and no more: this driver allows 6 MiB for one tensor" in caplog.text
    with pytest.raises(UserError, match="too small"):
        ONE_SEQUENCE.pages(manifest(), largest=PAGE)


@pytest.mark.parametrize(
    ("tokens", "memory", "message"),
    [
        (128, "1G", "give one of them"),
        (1, None, "too small: it needs at least 64"),
        (None, "many", "--kv-memory 'many': give a number and a unit, as 4G, or auto"),
    ],
)
def test_refused(tokens, memory, message):
    with pytest.raises(UsageError, match=message):
        KvSize.of(tokens, memory)


def test_available_memory(tmp_path, monkeypatch):
    free = host.available_memory()
    assert free > 1 << 20
    for name, content in (("memory.max", f"{free // 2}\n"), ("memory.current", f"{free // 4}\n")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert host.available_memory() == free // 2 - free // 4
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_memory() > free // 2


@pytest.mark.slow
def test_engines_and_commands(demo_artifact, capsys):
    with Engine.load(demo_artifact, RunOptions(kv_memory="1M")) as engine:
        whole = kv_bytes(kv_types(engine.artifact.manifest))
        assert kv_bytes(engine.device.kv_types) <= 1 << 20 < whole
        assert engine.cache.longest == engine.device.kv_types["k.0"][0][0] * PAGE < engine.context
        small = engine.prefill(range(20))
    with Engine.load(demo_artifact, RunOptions(kv_memory="auto")) as engine:
        assert kv_bytes(engine.device.kv_types) > whole
        assert (engine.prefill(range(20)) == small).all()
    assert cli.main(["generate", str(demo_artifact), "--prompt", "a", "-n", "1", "--kv-memory", "1M"]) == 0
    assert cli.main(["generate", str(demo_artifact), "--prompt", "a", "--kv-memory", "all"]) == 2
    assert cli.main(["generate", str(demo_artifact), "--prompt", "a", "--kv-memory", "1K"]) == 1
    assert "--kv-memory is too small for a KV cache of 64 tokens, which takes" in capsys.readouterr().err
    assert cli.main(["bench", str(demo_artifact), "-p", "512", "-n", "0", "--kv-memory", "1M"]) == 1
    assert "pp512 needs a KV cache of 512 tokens, this one holds" in capsys.readouterr().err
