"""Counters of asynchronous exchanges, with lead and staleness."""

from __future__ import annotations

from collections import Counter


class ExchangeCounts:
    """Counters of one learner, guarded by the lock of its live weights.

    Attributes:
        lead: own steps since the last finished exchange, own or served.
    """

    def __init__(self) -> None:
        self.steps = self.started = self.finished = self.served = self.failed = 0
        self.lead = self._largest_lead = 0
        self._since_read = 0  # exchanges since the module's weights were copied from the live ones
        self._staleness_sum = self._largest_staleness = 0
        self._with_peer: Counter[int] = Counter()

    def step_begins(self) -> None:
        """A gradient is about to be applied; it was taken at the weights that were read last."""
        self._staleness_sum += self._since_read
        self._largest_staleness = max(self._largest_staleness, self._since_read)

    def step_ends(self) -> None:
        """A gradient was applied, and the weights are read anew."""
        self.steps += 1
        self.lead += 1
        self._largest_lead = max(self._largest_lead, self.lead)
        self.weights_read()

    def weights_read(self) -> None:
        """The module's weights are up to date."""
        self._since_read = 0

    def call_started(self, peer: int) -> None:
        """An own exchange begins."""
        self.started += 1
        self._with_peer[peer] += 1

    def exchanged(self) -> None:
        """An exchange, own or served, has changed the live weights."""
        self.lead = 0
        self._since_read += 1

    def metrics(self) -> dict[str, float]:
        """All counters, by name. Staleness counts exchanges between reading weights and applying their gradient."""
        steps = max(self.steps, 1)
        return {
            "exchanges_started": self.started,
            "exchanges_finished": self.finished,
            "exchanges_served": self.served,
            "exchanges_failed": self.failed,
            "exchanges_per_step": self.started / steps,
            "staleness_mean": self._staleness_sum / steps,
            "staleness_max": self._largest_staleness,
            "lead": self.lead,
            "lead_max": self._largest_lead,
        } | {f"exchanges_with_{peer}": count for peer, count in sorted(self._with_peer.items())}
