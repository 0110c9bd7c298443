"""Every topology in every size it can have."""

from __future__ import annotations

import pytest

from roundelay.topology import TOPOLOGIES

POWERS_OF_TWO_ONLY = ("hypercube", "one-peer-exponential")


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sizes(topology: str) -> list[int]:
    """1..64, as far as this topology can have them."""
    return [1, 2, 4, 8, 16, 32, 64] if topology in POWERS_OF_TWO_ONLY else list(range(1, 65))
