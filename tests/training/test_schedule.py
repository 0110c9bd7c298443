from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from roundelay.training.config import OptimizerConfig, ScheduleConfig
from roundelay.training.schedule import Schedule

EPOCH, TOTAL = 1000, 16_000


def papers(batch: int) -> Schedule:
    """Batch 256 at 0.1, scaled linearly over ten epochs of warm-up, then 1/sqrt(2) an epoch (arXiv:2002.01119)."""
    shape = ScheduleConfig(reference_batch=256, warmup_epochs=10, shape="factor", decay_after_epochs=10)
    return Schedule(OptimizerConfig(lr=0.1), shape, batch=batch, epoch=EPOCH, total=TOTAL)


@pytest.mark.parametrize(("batch", "peak"), [(2560, 1.0), (8192, 3.2), (256, 0.1)])
def test_the_papers_peak_rates_come_from_linear_scaling(batch, peak):
    assert papers(batch).at(10 * EPOCH - 1) == pytest.approx(peak, rel=1e-3)
    assert papers(batch).at(0) == pytest.approx(0.1)


def test_after_the_tenth_epoch_the_rate_falls_by_the_square_root_of_two_each():
    rates = [papers(2560).at(epoch * EPOCH) for epoch in range(10, 16)]
    assert rates == pytest.approx([2 ** (-(k + 1) / 2) for k in range(6)])


@given(st.integers(0, TOTAL))
def test_the_factor_is_constant_within_an_epoch(samples):
    schedule = papers(2560)
    if samples >= 10 * EPOCH:
        assert schedule.at(samples) == schedule.at(samples // EPOCH * EPOCH)


def test_cosine_goes_to_zero_at_the_end_of_the_run_and_is_half_in_the_middle():
    shape = ScheduleConfig(shape="cosine", warmup_epochs=4)
    schedule = Schedule(OptimizerConfig(lr=0.4), shape, batch=1, epoch=EPOCH, total=TOTAL)
    assert schedule.at(4 * EPOCH) == pytest.approx(0.4)
    assert schedule.at(10 * EPOCH) == pytest.approx(0.4 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert schedule.at(TOTAL) == pytest.approx(0.0, abs=1e-12)


def test_a_constant_rate_is_one():
    schedule = Schedule(OptimizerConfig(lr=0.3), ScheduleConfig(), batch=64, epoch=EPOCH, total=TOTAL)
    assert {schedule.at(s) for s in range(0, TOTAL, 999)} == {0.3}
