"""Who takes part: a value that can be replaced, and the heartbeats that tell who still lives."""

from roundelay.membership.members import Membership
from roundelay.membership.pulse import Pulse

__all__ = ["Membership", "Pulse"]
