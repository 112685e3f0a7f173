"""Tests for pool/config.py."""

import pytest
from pool_helpers import model

from headrace.pool import PoolConfig


@pytest.mark.parametrize(
    ("models", "fields"),
    [
        ((), {}),
        ((model("a"), model("a")), {}),
        ((model("a"), model("b", aliases=("a",))), {}),
        ((model("a", workers=0),), {}),
        ((model("a"),), {"max_in_flight": 0}),
        ((model("a"),), {"max_queue": -1}),
        ((model("a"),), {"default_max_tokens": 0}),
        ((model("a"),), {"stop_timeout_s": 0.0}),
    ],
)
def test_refuses_what_would_fail_late(models, fields):
    """A pool that can't work is refused when it is described."""
    with pytest.raises(ValueError):
        PoolConfig(models=models, **fields)
