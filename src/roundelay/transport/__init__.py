"""How learners reach each other: one seam, and what stands behind it."""

from roundelay.transport.base import Traffic, Transport
from roundelay.transport.simulated import SimulatedNetwork

__all__ = ["SimulatedNetwork", "Traffic", "Transport"]
