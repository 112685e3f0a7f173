"""What the gateway counts, for Prometheus. docs/metrics.md lists the names.

One object owns the registry and everything in it. Requests are seen by `RequestWatch`, which stands between
the pool and whoever takes a request's events, so that each is counted once, however its frames travel.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ..protocol.messages import End

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """Counters and histograms of one gateway.

    Args:
        collectors: add what others know at the moment of a scrape.
    """

    def __init__(self, collectors: Sequence[Collector] = ()) -> None:
        registry = self._registry = CollectorRegistry()
        self._ended = Counter(
            "headrace_requests",
            "Requests that have ended; reason: the finish reason, or why it was cancelled or failed",
            ("model", "kind", "status", "reason"),
            registry=registry,
        )
        self._refused = Counter(
            "headrace_refused", "Frames and HTTP requests that were refused", ("code",), registry=registry
        )
        self._ttft = Histogram(
            "headrace_ttft_seconds",
            "From acceptance to the first token",
            ("model", "specprefill"),
            registry=registry,
            buckets=_SECONDS,
        )
        self._queue = Histogram(
            "headrace_queue_seconds", "Time in the queue", ("model",), registry=registry, buckets=_SECONDS
        )
        self._gap = Histogram(
            "headrace_inter_token_seconds",
            "From one delta of a request to its next, by the tokens in it, as the gateway gets them",
            ("model",),
            registry=registry,
            buckets=_GAP_SECONDS,
        )
        self._prompt_tokens = Counter(
            "headrace_prompt_tokens",
            "Prompt tokens of answered requests: cached, read densely, kept or skipped by SpecPrefill",
            ("model", "how"),
            registry=registry,
        )
        self._completion_tokens = Counter(
            "headrace_completion_tokens", "Generated tokens", ("model",), registry=registry
        )
        self._specprefill = Counter(
            "headrace_specprefill",
            "Ended requests by what became of SpecPrefill: applied, or why not",
            ("model", "outcome"),
            registry=registry,
        )
        self._connections = Counter(
            "headrace_connections_opened", "WebSockets that were opened", registry=registry
        )
        self._frames = Counter("headrace_frames_sent", "Frames sent to clients", registry=registry)
        self._bytes = Counter("headrace_frame_bytes_sent", "Bytes of those frames", registry=registry)
        for collector in collectors:
            registry.register(collector)
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_refused(self, code: str) -> None:
        """Count a refused frame or HTTP request."""
        self._refused.labels(code).inc()

    def count_connection(self) -> None:
        """Count a WebSocket that was let in."""
        self._connections.inc()

    def count_written(self, frames: Sequence[bytes]) -> None:
        """Count frames that were written to a socket."""
        self._frames.inc(len(frames))
        self._bytes.inc(sum(map(len, frames)))

    def token_gaps(self, model: str) -> Histogram:
        """Return where the gaps of a model's tokens go: looked up once a request, as tokens are many."""
        return self._gap.labels(model)

    def observe_end(self, model: str, kind: str, end: End) -> None:
        """Take the end of a request."""
        reason = end.finish_reason or end.reason or "none"
        self._ended.labels(model, kind, end.status, reason).inc()
        self._completion_tokens.labels(model).inc(end.usage["completion_tokens"])
        report, timings = end.specprefill, end.timings
        outcome = "applied" if report["applied"] else report["reason"] or "none"
        self._specprefill.labels(model, outcome).inc()
        if (queue_ms := timings["queue_ms"]) is not None:
            self._queue.labels(model).observe(queue_ms / 1e3)
        if (ttft_ms := timings["ttft_ms"]) is None:
            return  # its prompt was not read, or not to its end
        self._ttft.labels(model, str(report["applied"]).lower()).observe(ttft_ms / 1e3)
        kept, uncached = report["kept_tokens"], report["uncached_tokens"]
        how = {"cached": end.usage["cached_tokens"]}
        how |= {"kept": kept, "skipped": uncached - kept} if report["applied"] else {"dense": uncached}
        for name, num_tokens in how.items():
            self._prompt_tokens.labels(model, name).inc(num_tokens)
