"""A real pool of scripted engines for all tests of this folder, and a gateway in front of it for each."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent.parent / "gateway"))
sys.path.insert(0, str(Path(__file__).parent))

from gateway_helpers import make_gateway, scripted_pool_config, wait_until

from headrace.gateway.server import Gateway
from headrace.pool import Pool


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool() -> AsyncIterator[Pool]:
    """Two models: `fast`, the default, and `slow`, 5 ms a token."""
    async with Pool(scripted_pool_config(fast=0.0, slow=5.0)) as pool:
        await pool.wait_ready(20)
        await wait_until(lambda: all(model["state"] == "ready" for model in pool.list_models()))
        yield pool


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(pool: Pool) -> AsyncIterator[Gateway]:
    """A gateway with default limits; afterwards nothing of the test may run on in the pool."""
    gateway = make_gateway(pool)
    await gateway.start()
    yield gateway
    gateway.abort()
    await wait_until(lambda: gateway.num_connections == 0)
    await wait_until(lambda: pool.statistics().in_flight == 0)
