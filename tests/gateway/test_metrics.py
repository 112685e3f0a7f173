"""Metrics add up after a known load, by prometheus-client's own parser; and the log of ended requests."""

import asyncio
import http.client
import logging
import re
from collections import Counter
from pathlib import Path

import pytest
from gateway_helpers import Client, running_gateway, wait_until
from prometheus_client.parser import text_string_to_metric_families

from headrace.gateway.server import Gateway
from headrace.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _scrape(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    return response.read().decode()


class Scrape:
    """One scrape: `value` sums all samples of a name that have certain labels."""

    def __init__(self, text: str) -> None:
        self.samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum; the name must be there."""
        named = [sample for sample in self.samples if sample.name == name]
        assert named, name
        return sum(s.value for s in named if labels.items() <= s.labels.items())


async def scrape(gateway: Gateway) -> Scrape:
    """Return the metrics as they stand."""
    return Scrape(await asyncio.to_thread(_scrape, gateway.port))


async def test_values_add_up_after_a_known_load(gateway: Gateway) -> None:
    """Requests by their ends, tokens, frames and bytes, refusals by code."""
    async with Client(gateway.url) as client:
        for number in range(4):
            await client.complete(f"c{number}", "one two three", max_tokens=10)
        await client.send(type="chat", id="h", messages=[{"role": "user", "content": "x"}], max_tokens=5)
        await client.complete("cancelled", max_tokens=100_000, model="slow")
        while not client.deltas("cancelled"):
            await client.receive()
        await client.send(type="cancel", id="cancelled")
        await client.complete("bad", temperature=3)
        await client.complete("unknown", model="nobody")
        ends = {name: await client.done(name) for name in ("c0", "c1", "c2", "c3", "h", "cancelled")}
        errors = Counter([(await client.done(name))["code"] for name in ("bad", "unknown")])
        # The frames of a write are counted right after it.
        now = await scrape(gateway)
        assert now.value("headrace_connections") == 1
    assert now.value("headrace_requests_total", kind="completion", status="completed", reason="length") == 4
    assert now.value("headrace_requests_total", kind="chat", status="completed") == 1
    assert now.value("headrace_requests_total", model="slow", status="cancelled", reason="client") == 1
    assert now.value("headrace_requests_total") == 6
    usage = Counter[str]()
    for end in ends.values():
        usage.update(end["usage"])
    assert now.value("headrace_completion_tokens_total") == usage["completion_tokens"]
    assert now.value("headrace_prompt_tokens_total", how="dense") == (
        usage["prompt_tokens"] - usage["cached_tokens"]
    )
    assert now.value("headrace_prompt_tokens_total", how="cached") == usage["cached_tokens"]
    assert now.value("headrace_ttft_seconds_count") == 6
    assert now.value("headrace_queue_seconds_count") == 6
    first_deltas = sum(client.deltas(name)[0]["n"] for name in ends)
    gaps = now.value("headrace_inter_token_seconds_count")
    assert gaps == pytest.approx(usage["completion_tokens"] - first_deltas, abs=first_deltas)
    assert {code: now.value("headrace_refused_total", code=code) for code in errors} == dict(errors)
    num_frames = len(client.others) + sum(map(len, client.frames.values()))
    assert now.value("headrace_frames_sent_total") == num_frames
    assert now.value("headrace_frame_bytes_sent_total") > 20 * num_frames
    assert now.value("headrace_connections_opened_total") == 1


async def test_engines_are_seen_at_the_scrape(gateway: Gateway) -> None:
    """State, memory, restarts, and requests by phase: zero when nothing runs."""
    now = await scrape(gateway)
    assert now.value("headrace_engine_state", engine="fast/0", state="ready") == 1
    assert now.value("headrace_engine_state", engine="fast/0") == 1, "it is in one state"
    assert now.value("headrace_engine_restarts_total") == 0
    assert now.value("headrace_ready") == 1
    async with Client(gateway.url) as client:
        await client.complete("a", max_tokens=100_000, model="slow")
        await client.receive_type("delta")
        now = await scrape(gateway)
        assert now.value("headrace_engine_requests", engine="slow/0", phase="decoding") == 1
        assert now.value("headrace_requests_in_flight") == 1
    await wait_until(lambda: gateway.num_connections == 0)
    assert (await scrape(gateway)).value("headrace_connections") == 0


async def test_refused_http_requests_are_counted(pool: Pool) -> None:
    """By the code of the answer; nothing that a client sends becomes a label."""
    async with running_gateway(pool) as gateway:
        for method, path, headers in (
            ("GET", "/nothing", {}),
            ("GET", "/healthz", {"Host": "evil.example"}),
            ("HEAD", "/healthz", {}),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)

            def ask(connection=connection, method=method, path=path, headers=headers) -> None:
                connection.request(method, path, headers=headers)
                connection.getresponse().read()

            await asyncio.to_thread(ask)
        now = await scrape(gateway)
    assert now.value("headrace_refused_total", code="not_found") == 1
    assert now.value("headrace_refused_total", code="forbidden_host") == 1
    assert now.value("headrace_refused_total", code="method_not_allowed") == 1
    assert now.value("headrace_refused_total") == 3


async def test_two_gateways_count_for_themselves(pool: Pool) -> None:
    """Each owns its registry."""
    async with running_gateway(pool) as one, running_gateway(pool) as other:
        async with Client(one.url) as client:
            await client.complete("a", max_tokens=3)
            await client.done("a")
        assert (await scrape(one)).value("headrace_completion_tokens_total") == 3
        assert all(s.name != "headrace_completion_tokens_total" for s in (await scrape(other)).samples)


async def test_the_log_of_ended_requests(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """One record each, with what happened and no text."""
    caplog.set_level(logging.INFO, "headrace.requests")
    async with Client(gateway.url) as client:
        await client.complete("mine", "a secret prompt", max_tokens=4, specprefill_debug=True)
        done = await client.done("mine")
    (record,) = [record for record in caplog.records if record.name == "headrace.requests"]
    fields = record.request  # type: ignore[attr-defined]
    assert (fields["id"], fields["kind"], fields["model"]) == ("mine", "completion", "fast")
    assert fields["rid"] == client.frames["mine"][0]["rid"]
    assert (fields["usage"], fields["timings"]) == (done["usage"], done["timings"])
    assert "secret" not in repr(vars(record))


async def test_the_dashboard_and_the_page_name_metrics_that_exist(gateway: Gateway) -> None:
    """docs/grafana and docs/metrics.md: no other name, and the page has every one of ours."""
    docs = Path(__file__).parent.parent.parent / "docs"
    async with Client(gateway.url) as client:
        await client.complete("a", max_tokens=3)
        await client.done("a")
        await client.complete("b", model="nobody")
        await client.done("b")
        names = {sample.name for sample in (await scrape(gateway)).samples}
    dashboard = set(re.findall(r"headrace_\w+", (docs / "grafana/headrace.json").read_text()))
    assert dashboard <= names
    page = set(re.findall(r"`(headrace_\w+)", (docs / "metrics.md").read_text()))
    ours = {name for name in names if name.startswith("headrace_") and not name.endswith("_created")}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in ours}
    assert page == families
