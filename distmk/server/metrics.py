"""Prometheus metrics, under vLLM's names where vLLM has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distmk.api.outputs import DraftStats, EngineStats
from distmk.errors import DistmkError

_FIRST_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_BETWEEN_S = (
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
_REQUEST_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_COUNTS = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")


@dataclass
class RequestTimes:
    """When one completion was asked for and when its tokens came, in seconds of one clock."""

    arrived_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0


@dataclass
class Metrics:
    """The metrics of one server, in a registry of its own. `stats` is called at every scrape."""

    model_name: str
    stats: Callable[[], EngineStats]
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        labels = (self.model_name, "0")

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", what, _LABELS, buckets=buckets, registry=self.registry)
            return made.labels(*labels)

        self._first = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_S)
        self._between = histogram("inter_token_latency_seconds", "Time between two tokens of a sequence.", _BETWEEN_S)
        self._mean = histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of a request.", _BETWEEN_S
        )
        self._whole = histogram("e2e_request_latency_seconds", "Time of a request.", _REQUEST_S)
        self._decode = histogram(
            "request_decode_time_seconds", "Time from a request's first to last token.", _REQUEST_S
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens that a request generated.", _TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._n = histogram("request_params_n", "n of a request.", _COUNTS)
        self._success = Counter(
            "vllm:request_success", "Requests that ended.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self._refused = Counter(
            "distmk:requests_refused", "Requests refused as too many wait.", _LABELS, registry=self.registry
        ).labels(*labels)
        self.registry.register(_EngineCollector(labels, self.stats))

    def submitted(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        """A prompt was submitted."""
        self._prompt.observe(prompt_tokens)
        self._max_tokens.observe(max_tokens)
        self._n.observe(n)

    def refused(self) -> None:
        """A request found the queue full."""
        self._refused.inc()

    def token(self, times: RequestTimes, now_s: float) -> None:
        """A token came for the completion of `times`, which is brought up to date."""
        if times.last_s is None:
            times.first_s = now_s
            self._first.observe(now_s - times.arrived_s)
        else:
            self._between.observe(now_s - times.last_s)
        times.last_s = now_s
        times.num_tokens += 1

    def ended(self, times: RequestTimes, reason: str) -> None:
        """A completion ended: stop, length, abort, or error."""
        self._success.labels(self.model_name, "0", reason).inc()
        self._generated.observe(times.num_tokens)
        if times.first_s is None or times.last_s is None:
            return
        self._whole.observe(times.last_s - times.arrived_s)
        self._decode.observe(times.last_s - times.first_s)
        if times.num_tokens > 1:
            self._mean.observe((times.last_s - times.first_s) / (times.num_tokens - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own counts, read at a scrape; there are none once the engine has ended."""

    def __init__(self, labels: tuple[str, str], stats: Callable[[], EngineStats]) -> None:
        self._labels = labels
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._stats()
        except DistmkError:
            return
        for name, what, value in (
            ("vllm:num_requests_running", "Sequences in the batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting),
            (
                "distmk:oldest_waiting_request_age_seconds",
                "Time for which the first of the waiting sequences has waited.",
                stats.oldest_waiting_s,
            ),
            ("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", stats.kv_usage),
            ("distmk:kv_pages", "KV pages.", stats.num_kv_pages),
            ("distmk:free_kv_pages", "KV pages that are free.", stats.num_free_kv_pages),
            ("distmk:iteration_seconds", "Mean time of the last iterations.", stats.iteration_ms / 1e3),
        ):
            gauge = GaugeMetricFamily(name, what, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, what, value in (
            ("vllm:prompt_tokens", "Prompt tokens read.", stats.num_prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("vllm:num_preemptions", "Sequences put back for lack of pages.", stats.num_preemptions),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the KV cache.", stats.num_prefix_hits),
            ("distmk:iterations", "Iterations of the kernel.", stats.num_iterations),
        ):
            counter = CounterMetricFamily(name, what, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        if stats.drafts is not None:
            yield from self._drafts(stats.drafts)

    def _drafts(self, drafts: DraftStats) -> Iterator[Metric]:
        for name, what, value in (
            ("drafts", "How often drafts of a sequence were verified.", drafts.num_drafts),
            ("draft_tokens", "Drafts that were verified.", drafts.num_draft_tokens),
            ("accepted_tokens", "Drafts that were accepted.", sum(drafts.num_accepted)),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_num_{name}", what, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place behind the last token, from 0.",
            labels=(*_LABELS, "position"),
        )
        for place, num in enumerate(drafts.num_accepted):
            by_place.add_metric((*self._labels, str(place)), num)
        yield by_place
