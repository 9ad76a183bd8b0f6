"""`GET /metrics`: the metrics of a server, for Prometheus.

Metrics that vLLM's server has, too, have vLLM's names: load balancers of the Kubernetes Gateway API use
`vllm:num_requests_waiting`, `vllm:num_requests_running` and `vllm:kv_cache_usage_perc`
(gateway-api-inference-extension, model server protocol), and there are dashboards for the others. Only metrics that
vLLM does not have begin with `mlc_amd:`. Each but `mlc_amd:http_requests` has the label `model_name`.

Queue and cache are read from the engines when the metrics are requested.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.engine.generation import Stats
from mlc_amd.tools.server.library import Library

_LABELS = ("model_name",)
# The buckets of vLLM's histograms, in seconds.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
# field of `Stats` -> the counter of its sum
_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("vllm:prefix_cache_hits", "Tokens of prompts found in the KV cache."),
    "generated": ("vllm:generation_tokens", "Tokens of answers."),
    "guessed": ("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed and verified."),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right."),
}


class Metrics:
    """The metrics of one server. Call `answered` for each answer and `responded` for each request."""

    def __init__(self, library: Library) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(_Engines(library))

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = _LABELS) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to the first token.", _TTFT)
        mean = "Mean time of an answer's tokens after the first."
        self._token = histogram("vllm:request_time_per_output_token_seconds", mean, _TOKEN)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Time of whole answers.", _WHOLE)
        self._counters = {name: counter(*about) for name, about in _COUNTERS.items()}
        self._texts = counter("mlc_amd:encoded_texts", "Texts that became vectors or scores.")
        reasons = (*_LABELS, "finished_reason")
        self._answers = counter("vllm:request_success", "Answers by the reason why they ended.", reasons)
        self._requests = counter("mlc_amd:http_requests", "HTTP requests by path and status.", ("path", "status"))

    def answered(self, model: str, stats: Stats) -> None:
        """Called when an answer of this model has ended, or was ended."""
        for name, counter in self._counters.items():
            counter.labels(model).inc(getattr(stats, name))
        self._answers.labels(model, "abort" if stats.finish == "interrupted" else stats.finish).inc()
        if stats.ttft_s:
            self._ttft.labels(model).observe(stats.ttft_s)
            self._whole.labels(model).observe(stats.ttft_s + stats.decode_s)
        if stats.generated > 1:
            self._token.labels(model).observe(stats.decode_s / (stats.generated - 1))

    def encoded(self, model: str, texts: int, tokens: int) -> None:
        """Called when texts became vectors or scores. texts, tokens: their numbers."""
        self._counters["prompt_tokens"].labels(model).inc(tokens)
        self._texts.labels(model).inc(texts)

    def responded(self, path: str, status: int) -> None:
        self._requests.labels(path, status).inc()


class _Engines(Collector):
    def __init__(self, library: Library) -> None:
        self._library = library

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Answers that wait.", labels=_LABELS)
        running = GaugeMetricFamily("vllm:num_requests_running", "Answers that are generated.", labels=_LABELS)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", labels=_LABELS)
        loaded = GaugeMetricFamily("mlc_amd:model_loaded", "Whether a model is loaded.", labels=_LABELS)
        names = (*_LABELS, "block_size", "num_gpu_blocks")
        config = GaugeMetricFamily("vllm:cache_config_info", "Tokens of a page, and number of pages.", labels=names)
        for name in self._library.names:
            model = self._library.loaded.get(name)
            loaded.add_metric([name], bool(model))
            queue, cache = (model.engine.queue, model.engine.kv_usage) if model else ((0, 0), (0, 0))
            waiting.add_metric([name], queue[0])
            running.add_metric([name], queue[1])
            usage.add_metric([name], cache[0] / max(cache[1], 1))
            config.add_metric([name, str(PAGE), str(cache[1])], 1)
        return iter((waiting, running, usage, config, loaded))


async def metrics(request: Request) -> Response:
    found: Metrics = request.app.state.service.metrics
    return Response(generate_latest(found.registry), media_type=CONTENT_TYPE_LATEST)
