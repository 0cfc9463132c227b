"""Four gloo ranks, started once."""

import pytest

from moe_ops.testing.ranks import shared_pool


@pytest.fixture(scope="session")
def ranks():
    return shared_pool()
