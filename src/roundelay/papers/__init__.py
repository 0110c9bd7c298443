"""The papers' claims as experiments: one file per claim, each with a setting, seeds, figures and a verdict from the data."""

from roundelay.papers import delay_by_one, equal_bytes, large_batches, mixing, rate, stragglers
from roundelay.papers.claim import Claim, Finding, Interval, Line, Panel

CLAIMS: dict[str, Claim] = {
    module.CLAIM.name: module.CLAIM for module in (mixing, large_batches, stragglers, delay_by_one, rate, equal_bytes)
}

__all__ = ["CLAIMS", "Claim", "Finding", "Interval", "Line", "Panel"]
