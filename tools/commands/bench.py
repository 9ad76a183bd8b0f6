"""`mlc-amd bench`: prefill and decode speed, with the meaning, column names and output formats of llama-bench.

A test is `pp<n>` (prefill n tokens) or `tg<n>` (decode n tokens, one at a time); `@ d<k>` means that k tokens are in
the KV cache before it. Tokens are random and only the engine is timed: no tokenizer, no sampling. Each test has one
warm-up run, then r measured runs. Before that, a GPU is kept busy briefly to raise its clocks. Power sensors
(tools/measure/power.py) are read during the measured runs. If these are short, they are also read during further runs,
which are not timed.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np

from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.gpus import peak_bandwidth
from mlc_amd.runtime.options import MANY, LoadOptions, Option
from mlc_amd.runtime.speculation.speculation import MOST
from mlc_amd.tools.hub import models
from mlc_amd.tools.measure import (
    bandwidth,
    bench_encoder,
    bench_formats,
    bench_images,
    bounds,
    host_profile,
    kernel_table,
    power,
)
from mlc_amd.tools.measure.bench_runs import Test, fill, measure, warm
from mlc_amd.tools.options import Defaults, Synthetic, Without
from mlc_amd.tools.terminal import display

SHORT = {"np": "n_seqs", "p": "n_prompt", "n": "n_gen", "d": "n_depth", "r": "repetitions", "o": "output"}
_MIN_CONTEXT = 512  # tokens; the least context that is compiled for
_NEEDED = Defaults(ctx="what the tests need", kv_memory="what the tests need")
_MOST_SEQUENCES = 64  # limit of the sequences of a step


def run(
    *,
    n_prompt: Annotated[tuple[int, ...], Option(
        "number of tokens to prefill; 0 skips prefill", low=0, high=MANY)] = (512,),
    n_gen: Annotated[tuple[int, ...], Option("number of tokens to decode; 0 skips decode", low=0, high=MANY)] = (128,),
    n_depth: Annotated[tuple[int, ...], Option(
        "number of tokens in the KV cache before each test", low=0, high=MANY)] = (0,),
    n_seqs: Annotated[tuple[int, ...], Option(
        "number of sequences that decode together; t/s is that of all of them", low=1, high=_MOST_SEQUENCES)] = (1,),
    speculate: Annotated[tuple[float, ...], Option(
        "decode also with guesses of the next tokens, of which this share is right, as 0.7: what a draft would gain "
        "that takes no time itself", low=0, high=1)] = (),
    image: Annotated[tuple[str, ...], Option(
        "measure the model's image encoder instead, with pictures of so many pixels, as 1024x768; -np: pictures at "
        "once")] = (),
    repetitions: Annotated[int, Option("number of measured runs of each test", low=1, high=MANY)] = 5,
    output: Literal["md", "json", "jsonl", "csv"] = "md",
    synthetic: Synthetic = None,
    per_kernel: bool = False,
    profile_host: bool = False,
    load: Annotated[LoadOptions, Without("tuned", "verify", "kv_tokens", "cache_disk", "draft"), _NEEDED],
) -> None:  # fmt: skip
    """Measures prefill (pp) and decode (tg) speed in tokens per second, with llama-bench's columns.

    Of an embedding or ranking model: texts of -p tokens each, -np of them at once, in tokens and texts per second. With
    --image: of the image encoder of a model that sees.

    For decode it adds the memory traffic of weights and KV cache in GB/s, and as fractions of the read (cpu) or copy
    (GPU) bandwidth measured right before the test and, of a known product, of the one that its maker states; and the
    host time per token, without waiting. Where sensors tell the power of the device: watts, and joules per token.

    Args:
        output: format of the result.
        per_kernel: for each test, the time of every kernel of one step, its memory and arithmetic throughput, and the
            share that it reaches of what memory and arithmetic allow (md and json).
        profile_host: for decode, the time that the host spends on a token, sampling and detokenization included (md
            and json).
    """
    if image:
        sizes = bench_images.sizes_of(image)
        _write_all(bench_images.measure(load, sizes, n_seqs, repetitions), output, "images/s")
        return
    if bench_encoder.is_encoder(load, synthetic):
        with models.load_encoder(load, synthetic) as encoder:
            lengths = [n for n in n_prompt if n] or [512]
            _write_all(bench_encoder.measure(encoder, lengths, n_seqs, repetitions), output, "texts/s")
        return
    tests = plan_tests(n_prompt, n_gen, n_depth, n_seqs, speculate)
    needed = max(test.context for test in tests) + MOST * bool(speculate)
    load = replace(load, ctx=_context(load, synthetic, needed))
    engine = models.load_engine(load, synthetic, _cache_size(tests, load.kv_memory))
    if needed > engine.context:
        longest = engine.config["context"]
        fits = f"compile it with --ctx {needed}" if needed <= longest else f"the model was made for {longest} at most"
        raise UserError(f"the tests need a context of {needed} tokens, this artifact has {engine.context}: {fits}")
    _check_room(engine, tests, bool(load.kv_memory))
    if per_kernel and not hasattr(engine.device, "time"):
        raise UserError(f"--per-kernel: the device of target '{engine.device.kind}' cannot time single kernels")
    decodes = any(test.n_gen for test in tests)
    if engine.device.kind != "cpu":
        display.message(f"on {engine.device.name}")
    elif decodes and kernel_table.decode_bytes(engine.artifact, 0) < bandwidth.last_level_cache():
        display.message("this model fits into the CPU's cache: memory bandwidth says little about its speed")
    try:
        sensors = power.sensors(engine.device)
    except power.NoSensor as why:
        display.message(f"no watts: {why}")
        sensors = []
    hidden = [*bench_formats.OF_OTHERS, *([] if load.n_cpu_moe else ["n_cpu_moe"])]  # as llama-bench
    hidden += [] if peak_bandwidth(engine.device.name) else ["of table"]
    hidden += [] if sensors else ["W", "J/token"]
    begin, write, end = bench_formats.writer(output, hidden)
    sys.stdout.write(begin)
    tables = []
    for test in tests:
        result = _result(engine, test, repetitions, per_kernel, sensors) | {"n_cpu_moe": load.n_cpu_moe}
        if per_kernel and test.n_seqs == 1:
            result["per_kernel"] = _per_kernel(engine, test, result)
            source = str(result["peak_product"] or result["machine_how"] or "")
            tables.append(kernel_table.text(result["per_kernel"], source))
        if profile_host and test.n_gen and test.n_seqs == 1:
            fill(engine, test.n_depth)
            result["host_profile"] = host_profile.measure(engine, test.n_gen)
            tables.append(f"{test.name}\n{host_profile.text(result['host_profile'])}")
        sys.stdout.write(write(result))
        sys.stdout.flush()
    sys.stdout.write(end)
    if output == "md":
        sys.stdout.write("".join(f"\n{table}" for table in tables))


def _write_all(results: Iterable[dict], output: str, column: str) -> None:
    """Writes the results of an encoder, which generates no tokens. column: what it is measured by in addition."""
    hidden = {*bench_formats.OF_TOKENS, *bench_formats.OF_OTHERS} - {column}
    begin, write, end = bench_formats.writer(output, hidden)
    sys.stdout.write(begin)
    for result in results:
        sys.stdout.write(write(result))
        sys.stdout.flush()
    sys.stdout.write(end)


def plan_tests(
    n_prompt: Sequence[int],
    n_gen: Sequence[int],
    n_depth: Sequence[int],
    n_seqs: Sequence[int] = (1,),
    speculate: Sequence[float] = (),
) -> list[Test]:
    """The tests in llama-bench's order: for each depth the prefill tests, then the decode tests by fewer and by more
    sequences, each first without guesses and then with them."""
    tests, guesses = [], (None, *speculate)
    for depth in n_depth:
        tests += [Test(n, 0, depth) for n in n_prompt if n]
        tests += [Test(0, n, depth, count, right) for n in n_gen if n for count in n_seqs for right in guesses]
    if not tests:
        raise UsageError("nothing to measure: give -p or -n a number above 0")
    return tests


def _cache_size(tests: Sequence[Test], memory: int | str | None) -> KvSize:
    """The size of the cache for the tests. A single sequence without guesses gets the full length. memory: the size
    that the user gives."""
    sequences = max(test.n_seqs for test in tests)
    if memory:
        return replace(KvSize.of(memory=memory), sequences=sequences)
    if sequences == 1 and all(test.right is None for test in tests):
        return ONE_SEQUENCE
    return KvSize(max(map(_tokens, tests)), sequences=sequences)


def _tokens(test: Test) -> int:
    """The tokens of the cache for all of the test's sequences: whole pages, with room for guesses if there are several
    sequences or guesses are tested."""
    more = 0 if test.n_seqs == 1 and test.right is None else MOST
    return test.n_seqs * -(-(test.context + more) // PAGE) * PAGE


def _check_room(engine: Engine, tests: Sequence[Test], sized: bool) -> None:
    """Raises UserError if the cache has no room for a test. sized: whether the user gave its size."""
    for test in tests:
        if not engine.cache.holds(test.n_seqs, _tokens(test) // test.n_seqs):
            many = f" of {test.n_seqs} sequences" if test.n_seqs > 1 else ""
            held = engine.kv_usage.pages * PAGE
            advice = "give a larger --kv-memory" if sized else "give smaller -np, -d, -p or -n"
            raise UserError(
                f"{test.name} needs a KV cache of {_tokens(test)} tokens{many}, this one holds {held}: {advice}"
            )


def _context(load: LoadOptions, synthetic: str | None, needed: int) -> int | None:
    """The context to compile for. It is a power of two, so that the user's cache does not fill with copies of a model
    for many different contexts; or the model's own context if this is smaller. An artifact has a context: returns the
    option unchanged. Before anything is compiled, raises UserError if the tests need more than the model's context or
    the user's option."""
    path, ctx = models.source_path(load.model, synthetic), load.ctx
    if path and models.is_artifact(path):
        return ctx
    with models.open_source(path, synthetic, override_kv=load.override_kv) as source:
        longest = source.config.context
    wanted = f"the tests need a context of {needed} tokens"
    if needed > longest:
        raise UserError(f"{wanted}, this model was made for {longest}: give smaller -d, -p or -n")
    if ctx is not None and needed > ctx:
        raise UserError(f"{wanted}: give --ctx {needed} or more, or leave it out")
    return ctx or min(max(_MIN_CONTEXT, 1 << (needed - 1).bit_length()), longest)


def _per_kernel(engine, test: Test, result: dict) -> dict[str, object]:
    """The kernels' times in one step of the test, at the depth where the test begins."""
    fill(engine, test.n_depth)
    warm(engine)
    measured = result["machine_gbps"] and result["machine_gbps"] * 1e9
    limits = bounds.limits_on(engine.device, engine.artifact.manifest, measured)
    return kernel_table.measure(engine, np.arange(test.n_prompt or 1) % engine.vocab, limits)


def _result(
    engine, test: Test, repetitions: int, per_kernel: bool, sensors: Sequence[power.Sensor]
) -> dict[str, object]:
    """The measurements of one test, with llama-bench's field names where it has such fields."""
    engine.reset()
    warm(engine)
    measured = bandwidth.of_device(engine.device) if test.n_gen or per_kernel else None
    found, taken = measure(engine, test, repetitions, sensors)
    seconds = [one.seconds for one in found]
    rates = [test.tokens / s for s in seconds]
    from mlc_amd.schedules.formats import parameters

    manifest = engine.artifact.manifest
    product, peak = peak_bandwidth(engine.device.name) or (None, None)
    result = {
        "model_filename": str(engine.artifact.path),
        "model_type": f"{manifest['name']} {manifest['quantization']}",
        "model_size": sum(entry["bytes"] for entry in manifest["formats"].values()),
        "model_n_params": parameters(manifest["formats"]),
        "backends": manifest["target"]["kind"].upper(),
        "arch": manifest["target"]["arch"],
        "n_threads": engine.device.threads,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "n_seqs": test.n_seqs,
        "right_guesses": test.right,
        "test": test.name,
        "avg_ns": round(float(np.mean(seconds)) * 1e9),
        "stddev_ns": round(_deviation(seconds) * 1e9),
        "avg_ts": float(np.mean(rates)),
        "stddev_ts": _deviation(rates),
        "samples_ns": [round(s * 1e9) for s in seconds],
        "samples_ts": rates,
        "device_name": engine.device.name,
        "read_gbps": None,
        "machine_gbps": measured and measured[0] / 1e9,
        "machine_how": measured and measured[1],
        "read_share": None,
        "peak_product": product,
        "peak_gbps": peak,
        "peak_share": None,
        "host_us": None,
        "power_sensor": ", ".join(sensor.name for sensor in sensors) or None,
        "power_w": taken.watts,
        "joules_per_token": taken.per_token,
    }
    if test.n_gen:
        depth = test.n_depth + (test.n_gen - 1) / 2
        # in a step, for one row: all weights once, and the keys and values of its sequence
        step = kernel_table.decode_bytes(engine.artifact, depth)
        keys = step - kernel_table.decode_bytes(engine.artifact, 0)
        read = (step + keys * (test.n_seqs - 1)) * float(np.mean(rates)) / test.n_seqs / 1e9
        host = float(np.mean([one.host for one in found])) / test.n_gen * 1e6  # per step
        result |= {"read_gbps": read, "host_us": host}
        for of, share in (("machine_gbps", "read_share"), ("peak_gbps", "peak_share")):
            result[share] = read / result[of] if result[of] else None
    return result


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; 0 for a single value, as in llama-bench."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
