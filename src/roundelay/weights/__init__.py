"""A learner's weights: flat buffers for exchanges, and how the module's own weights follow them."""

from roundelay.weights.flat import Flat, Layout, all_finite
from roundelay.weights.replica import Replica

__all__ = ["Flat", "Layout", "Replica", "all_finite"]
