from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from roundelay.training.build import schedule_of, strategy_of
from roundelay.training.config import Config, DataConfig, OptimizerConfig, ScheduleConfig
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


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize(
    ("learners", "strategy", "group_size", "peak"),
    [
        (4, "allreduce", 1, 1),  # 64 samples, as the reference
        (8, "allreduce", 1, 2**0.5),  # DDP with twice the batch
        (4, "delay-by-one-gradients", 1, 1),
        (4, "adpsgd", 1, 2),  # sqrt(4) times DDP's rate
        (8, "delay-by-one", 1, 4),  # sqrt(8) times DDP's rate at 8
        (8, "local-sgd", 4, 2),  # two super-learners: sqrt(2) times DDP's rate at 8
        (8, "dpsgd", 0, 2**0.5),  # one machine, one super-learner: it is allreduce
    ],
)
def test_the_rate_of_adam_grows_with_the_noise_that_an_optimizer_sees(name, learners, strategy, group_size, peak):
    config = Config(
        "m:T",
        learners=learners,
        strategy=strategy,
        group_size=group_size,
        data=DataConfig(batch=16),
        optimizer=OptimizerConfig(name=name, lr=1.0),
        schedule=ScheduleConfig(reference_batch=64, warmup_epochs=2),
    )
    schedule = schedule_of(config, EPOCH, TOTAL, strategy_of(config))
    assert schedule.at(0) == 1.0  # before the warm-up the signal is larger than the noise
    assert schedule.at(2 * EPOCH) == pytest.approx(peak)


def test_without_a_reference_batch_the_rate_of_adam_is_the_one_given():
    optimizer = OptimizerConfig(name="adam", lr=0.3)
    schedule = Schedule(optimizer, ScheduleConfig(), batch=64, epoch=EPOCH, total=TOTAL, gradients=4)
    assert schedule.at(EPOCH) == 0.3


def test_a_constant_rate_is_one():
    schedule = Schedule(OptimizerConfig(lr=0.3), ScheduleConfig(), batch=64, epoch=EPOCH, total=TOTAL)
    assert {schedule.at(s) for s in range(0, TOTAL, 999)} == {0.3}
