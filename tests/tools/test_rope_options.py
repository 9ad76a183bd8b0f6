"""RoPE from the command line: tables are those of llama.cpp's arguments, kernels and weights those that are there.

The changes were compared with llama.cpp v0.5.0 by hand, on a Qwen3 in F16 and 91 tokens: KL at most 1e-5."""

from dataclasses import replace

import numpy as np
import pytest

from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.models.rope import rope_table, with_options
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import CompileOptions, LoadOptions, RopeOptions
from mlc_amd.tools import cli
from mlc_amd.tools.hub import models

TINY = "tiny:q4_0"
YARN = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 64, "yarn_beta_fast": 16.0}
IDS = list(range(5, 45))


@pytest.fixture(scope="module")
def config():
    return synthetic(TINY).config


def table(config, **options):
    return rope_table(with_options(config, RopeOptions(**options)).ropes["rope"], 100)


@pytest.mark.parametrize(
    ("options", "position", "of_plain"),
    [
        ({"rope_scale": 4.0}, 80, 20),
        ({"rope_freq_scale": 0.25}, 80, 20),
        ({"rope_scaling": "linear", "rope_scale": 0.5}, 20, 40),
        ({"rope_scaling": "none", "rope_scale": 4.0}, 30, 30),
        ({"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_ext_factor": 0.0}, 80, 20),
    ],
    ids=str,
)
def test_factors_divide_positions(config, options, position, of_plain):
    assert np.allclose(table(config, **options)[position], table(config)[of_plain], atol=1e-5)


def test_magnitude_base_and_mix(config):
    plain, flat = table(config), {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_ext_factor": 0.0}
    assert np.allclose(table(config, **flat, yarn_attn_factor=1.5), 1.5 * table(config, **flat))
    yarn = table(config, rope_scaling="yarn", rope_scale=4.0, yarn_attn_factor=1.5)  # without effect, as in llama.cpp
    assert np.allclose(yarn[0, ::2], 1 + 0.1 * np.log(4))
    base = with_options(config, RopeOptions(rope_freq_base=5e5)).ropes["rope"]
    assert base.base == 5e5 and not np.allclose(rope_table(base, 100), plain)
    changed = with_options(config, RopeOptions(**YARN, yarn_beta_slow=2.0, yarn_ext_factor=0.5)).ropes["rope"]
    found = changed.original_context, changed.beta_fast, changed.beta_slow, changed.ext_factor, changed.factor
    assert found == (64, 16.0, 2.0, 0.5, 4.0)


def test_an_artifact_shares_kernels_and_weights(tmp_path, monkeypatch):
    """Its logits are those of one that was compiled with the options."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = LoadOptions(target="cpu", ctx=64)
    plain = models.artifact_path(options, TINY)
    monkeypatch.setattr("mlc_amd.compiler.codegen.target.make_target", None)  # nothing is compiled
    changed = models.artifact_path(replace(options, **YARN), TINY)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert changed != plain and models.artifact_path(replace(options, **YARN), TINY) == changed
    same = {file.name for file in plain.iterdir() if file.samefile(changed / file.name)}
    assert {file.name for file in changed.iterdir()} - same == {"manifest.json", "tables.safetensors"}
    whole = tmp_path / "whole"
    models.compile_artifact(None, str(whole), CompileOptions(target="cpu", ctx=64, **YARN), TINY)
    found = []
    for path in (plain, changed, whole):
        with Engine.load(path) as engine:
            found.append(engine.prefill(IDS))
            rope = engine.config["ropes"]["rope"]
    assert np.array_equal(found[1], found[2]) and not np.array_equal(found[0], found[1])
    assert rope["factor"] == 4.0


def test_what_cannot_be_changed(demo_artifact, config, capsys):
    with pytest.raises(UsageError, match="say the same"):
        RopeOptions(rope_scale=2.0, rope_freq_scale=0.5)
    for options in ({"rope_scale": 0.0}, {"rope_freq_base": 1.0}, {"yarn_orig_ctx": 0}, {"rope_scaling": "x"}):
        with pytest.raises(UsageError):
            RopeOptions(**options)
    with pytest.raises(UserError, match="have no RoPE"):
        with_options(replace(config, ropes={}), RopeOptions(rope_scale=2.0))
    depends = {"rope": replace(config.ropes["rope"], log_multiplier=0.1)}
    with pytest.raises(UserError, match="scale of their attention depends on it"):
        with_options(replace(config, ropes=depends), RopeOptions(rope_scale=2.0))
    assert cli.main(["generate", str(demo_artifact), "-p", "x", "--rope-scale", "2"]) == 1
    assert "--rope-scale: " in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_layers_with_windows_keep_their_own(config):
    ropes = {**config.ropes, "local_rope": config.ropes["rope"]}
    changed = with_options(replace(config, ropes=ropes), RopeOptions(rope_scale=2.0)).ropes
    assert changed["local_rope"] == ropes["local_rope"] and changed["rope"].factor == 2.0
