"""The transports: what carries messages between learners."""

from roundelay.transport.base import Traffic, Transport
from roundelay.transport.simulated import SimulatedNetwork

__all__ = ["SimulatedNetwork", "Traffic", "Transport"]
