"""How learners reach each other: one seam, and what stands behind it."""

from roundelay.transport.base import Traffic, Transport
from roundelay.transport.memory import MemoryNetwork

__all__ = ["MemoryNetwork", "Traffic", "Transport"]
