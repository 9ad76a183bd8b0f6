"""The host's work for one generated token, without waiting for the device: for `mlc-amd bench --profile-host`.

In: an engine. Out: microseconds of each part of the work, as data (`measure`) and as text (`text`). The parts are those
of the engine: a token id in, the device's step, the most probable next token, its text.
"""

import time

from mlc_amd.runtime.sampling.sampler import Sampler
from mlc_amd.runtime.sampling.settings import Sampling
from mlc_amd.tools.terminal import display


class _Stopwatch:
    """Wraps a device. Adds up the seconds of its calls, without waiting."""

    def __init__(self, device):
        self.device, self.seconds = device, dict.fromkeys(("write", "run", "read"), 0.0)

    def __getattr__(self, name: str):
        value = getattr(self.device, name)
        if name not in self.seconds:
            return value

        def call(*args):
            start, waited = time.perf_counter(), self.device.waited
            result = value(*args)
            self.seconds[name] += time.perf_counter() - start - (self.device.waited - waited)
            return result

        return call


def measure(engine, tokens: int) -> dict[str, float]:
    """Generates `tokens` tokens greedily from the engine's position. Returns microseconds per token by part: engine
    (checks, bookkeeping), write, run, read (the device's calls, without waiting), sampling, text; their total; and
    waiting."""
    sampler, stream, token, recent = Sampler(Sampling()), engine.tokenizer.stream(), 0, []
    decoding = sampling = text = 0.0
    device = engine.device
    engine.device = watch = _Stopwatch(device)
    waited = device.waited
    try:
        for _ in range(tokens):
            begin = time.perf_counter()
            logits = engine.advance([token])
            decoded = time.perf_counter()
            token = sampler.sample(logits, recent)
            sampled = time.perf_counter()
            recent.append(token)
            stream.push(token)
            end = time.perf_counter()
            decoding, sampling, text = decoding + decoded - begin, sampling + sampled - decoded, text + end - sampled
    finally:
        engine.device = device
    waited = device.waited - waited
    engine_alone = decoding - waited - sum(watch.seconds.values())
    parts = {"engine": engine_alone, **watch.seconds, "sampling": sampling, "text": text}
    parts |= {"total": sum(parts.values()), "waiting": waited}
    return {name: seconds / tokens * 1e6 for name, seconds in parts.items()}


def text(parts: dict[str, float]) -> str:
    """The result of `measure` as a table."""
    what = {"write": "device.write", "run": "device.run", "read": "device.read", "waiting": "(waiting for the device)"}
    rows = [(what.get(name, name), f"{us:.1f}") for name, us in parts.items()]
    return display.table(("host, one token", "us"), rows, right=(1,))
