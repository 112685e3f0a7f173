"""A gateway with scripted engines that tells its counters: for soak.py and connections.py.

    python benchmarks/counting_server.py '{"token_delay_ms": 1.0}'

It prints its URL, then a line of JSON for each line that it reads, until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from dataclasses import asdict
from typing import Any

from headrace.engine.config import EngineConfig
from headrace.gateway.config import GatewayConfig, LimitsConfig, ListenConfig, ResumeConfig
from headrace.gateway.server import Gateway
from headrace.pool import ModelSpec, Pool, PoolConfig

MAX_CONNECTIONS = 50_000
MAX_IN_FLIGHT = 1024


def configuration(options: dict[str, Any]) -> tuple[PoolConfig, GatewayConfig]:
    """Return what to run."""
    engine = EngineConfig(
        name="m",
        kind="scripted",
        scripted_token_delay_ms=options.get("token_delay_ms", 0.0),
        max_batch_size=MAX_IN_FLIGHT,
    )
    models = (ModelSpec("m", engine, workers=options.get("workers", 1)),)
    pool = PoolConfig(models=models, max_in_flight=options.get("max_in_flight", 64), max_queue=100_000)
    gateway = GatewayConfig(
        listen=ListenConfig(port=0),
        limits=LimitsConfig(
            max_connections=MAX_CONNECTIONS,
            max_connections_per_address=MAX_CONNECTIONS,
            max_in_flight_per_connection=4096,
        ),
        resume=ResumeConfig(
            detach_timeout_s=options.get("detach_timeout_s", 60.0),
            replay_s=options.get("replay_s", 120.0),
            max_streams_per_token=options.get("max_streams", 100_000),
        ),
    )
    return pool, gateway


def counters(pool: Pool, gateway: Gateway) -> dict[str, Any]:
    """Return everything that must be zero when nobody is there, and what has ended."""
    statistics = pool.statistics()
    return {
        "connections": gateway.num_connections,
        "in_flight_tokens": sum(gateway.in_flight.values()),
        "in_flight_pool": statistics.in_flight,
        "in_flight_engines": sum(worker.status.stats.in_flight for worker in statistics.workers),
        "queued": sum(statistics.queued.values()),
        **{f"resumable_{name}": value for name, value in asdict(gateway.resumables).items()},
        "ended_total": sum(statistics.ended_total.values()),
    }


async def main(options: dict[str, Any]) -> None:
    """Serve until standard input ends."""
    pool_config, gateway_config = configuration(options)
    async with Pool(pool_config) as pool:
        await pool.wait_ready(60)
        gateway = Gateway(pool, gateway_config, server_version="0", max_queue=100_000, max_tokens=512)
        await gateway.start()
        print(gateway.url, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(counters(pool, gateway)), flush=True)
        gateway.abort()


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))
