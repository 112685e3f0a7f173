"""What the pool knows at the moment of a scrape, for Prometheus: engine processes, queues, memory."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..pool import WorkerState
from ..pool.pool import PoolStatistics, WorkerStatistics

_PHASES = ("waiting", "scoring", "prefilling", "decoding", "paused")


class PoolCollector(Collector):
    """Reads the pool's statistics, and the gateway's own gauges.

    Args:
        statistics: the pool's.
        gauges: values by metric name, without its prefix.
    """

    def __init__(
        self, statistics: Callable[[], PoolStatistics], gauges: Callable[[], Mapping[str, float]]
    ) -> None:
        self._statistics = statistics
        self._gauges = gauges

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance: the pool may not have been entered yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics as they stand."""
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"headrace_{name}", name.replace("_", " "), value=value)
        pool = self._statistics()
        yield GaugeMetricFamily("headrace_requests_in_flight", "Requests not ended", value=pool.in_flight)
        yield CounterMetricFamily(
            "headrace_requests_recovered",
            "Times a request lost its engine process and went on",
            value=pool.recovered_total,
        )
        queued = GaugeMetricFamily("headrace_requests_queued", "Requests that wait", labels=("model",))
        for model, number in pool.queued.items():
            queued.add_metric((model,), number)
        yield queued
        yield from _engines(pool.workers)


def _engines(workers: Iterable[WorkerStatistics]) -> Iterable[Metric]:
    labels = ("model", "engine")
    state = GaugeMetricFamily("headrace_engine_state", "1 for its state", labels=(*labels, "state"))
    requests = GaugeMetricFamily("headrace_engine_requests", "Its requests", labels=(*labels, "phase"))
    memory = GaugeMetricFamily("headrace_engine_memory_bytes", "Memory it holds", labels=labels)
    cache = GaugeMetricFamily("headrace_engine_prompt_cache_bytes", "Its prompt cache", labels=labels)
    entries = GaugeMetricFamily("headrace_engine_prompt_cache_entries", "Prompts in it", labels=labels)
    restarts = CounterMetricFamily("headrace_engine_restarts", "Times it was started again", labels=labels)
    steps = CounterMetricFamily("headrace_engine_steps", "Steps since its start", labels=labels)
    prefilled = CounterMetricFamily(
        "headrace_engine_prefill_tokens", "Prompt tokens read since its start", labels=labels
    )
    for worker in workers:
        status, stats = worker.status, worker.status.stats
        names = (status.model, status.name)
        for each in WorkerState:
            state.add_metric((*names, each.name.lower()), status.state is each)
        for phase in _PHASES:
            requests.add_metric((*names, phase), getattr(stats, phase))
        memory.add_metric(names, status.memory_bytes)
        cache.add_metric(names, stats.prompt_cache_bytes)
        entries.add_metric(names, stats.prompt_cache_entries)
        restarts.add_metric(names, status.restarts)
        steps.add_metric(names, stats.steps_total)
        prefilled.add_metric(names, stats.prefill_tokens_total)
    return (state, requests, memory, cache, entries, restarts, steps, prefilled)
