"""Asynchronous learners on the virtual clock behave as real ones did, if they get the step times of the real run.

Asynchronous learners depend on timing, so the test compares distributions. Some bounds are wider than the sampling error, because
threads and the operating system are not part of the model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from roundelay.simulation.compute import measured
from roundelay.simulation.network import Links
from roundelay.simulation.recipe import SimulatedRun
from roundelay.training import recipes
from roundelay.training.config_table import to_toml
from roundelay.training.metrics import Row, read_rows

PROGRAMS = Path(__file__).parent / "programs"
LEARNERS = range(4)
TABLE = recipes.table_of("tiny") | {
    "task": "paced:PacedDigits",
    "budget": {"epochs": 12.0},
    "checkpoint": {"every_epochs": 1.0},
    "metrics": {"every_s": 0.0},  # a row for every step
}
EVALUATIONS = 12
EXCHANGE = Links(latency_s=2e-4)  # a call between processes through shared memory takes 0.4 ms there and back

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Behaviour:
    """The metrics of a run."""

    rows: Sequence[Row]

    def of(self, learner: int, figure: str) -> np.ndarray:
        return np.array([row[figure] for row in self.rows if row["kind"] == "learner" and row["learner"] == learner])

    def last(self, figure: str) -> np.ndarray:
        """The last value of a figure, by learner."""
        return np.array([self.of(learner, figure)[-1] for learner in LEARNERS])

    def staleness(self, learner: int) -> np.ndarray:
        """The staleness of every single step."""
        total = self.of(learner, "staleness_mean") * self.of(learner, "steps")
        return np.diff(total).round()

    def losses(self) -> dict[int, float]:
        """Validation loss of the mean model by samples seen; a busy real run may skip evaluations."""
        return {row["samples_seen"]: row["loss"] for row in self.rows if row.get("split") == "valid"}


def train(folder: Path) -> Path:
    """Train with four real processes of different speed, and return the path of their metrics."""
    recipe = folder / "paced.toml"
    recipe.write_text(to_toml(TABLE))
    words = ["-m", "roundelay", "train", str(recipe), "--out", str(folder / "real")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAMS), *sys.path])}
    ended = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "real" / "metrics.jsonl"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The real run, and the simulated run with the step times of the real one."""
    folder = tmp_path_factory.mktemp("paced")
    metrics = train(folder)
    (folder / "simulated").mkdir()
    sys.path.insert(0, str(PROGRAMS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        SimulatedRun(recipes.resolve(TABLE), folder / "simulated", EXCHANGE, measured(metrics)).run()
    finally:
        sys.path.remove(str(PROGRAMS))
        torch.set_num_threads(threads)
    return Behaviour(list(read_rows(metrics))), Behaviour(list(read_rows(folder / "simulated" / "metrics.jsonl")))


def test_learners_take_the_same_shares_of_the_budget(runs):
    real, simulated = (run.last("steps") / run.last("steps").sum() for run in runs)
    assert real[0] > 2.5 * real[3], "the learners differ in speed, so their shares differ"
    np.testing.assert_allclose(simulated, real, rtol=0.1)


def test_every_learner_starts_and_serves_as_many_exchanges(runs):
    """A slow learner serves more exchanges than it starts, a fast one fewer."""
    real, simulated = runs
    for figure in ("exchanges_started", "exchanges_served"):
        of_steps = [run.last(figure) / run.last("steps") for run in (real, simulated)]
        np.testing.assert_allclose(*of_steps, rtol=0.2, err_msg=figure)
    answers = real.last("exchanges_served") / real.last("exchanges_started")
    assert answers[3] > 2 * answers[0]


def test_staleness_has_the_same_distribution_for_every_learner(runs):
    """Means agree to a fifth (sampling alone gives a twentieth), distributions by the Kolmogorov-Smirnov distance."""
    real, simulated = runs
    np.testing.assert_allclose(simulated.last("staleness_mean"), real.last("staleness_mean"), rtol=0.2)
    assert real.last("staleness_mean")[3] > 1.6 * real.last("staleness_mean")[0], (
        "slow learners work with older weights"
    )
    for learner in LEARNERS:
        assert ks_2samp(real.staleness(learner), simulated.staleness(learner)).statistic < 0.25


def test_the_mean_model_follows_the_same_curve(runs):
    real, simulated = (run.losses() for run in runs)
    common = sorted(real.keys() & simulated.keys())
    assert len(simulated) == EVALUATIONS
    assert len(common) >= EVALUATIONS / 2
    ratios = np.array([simulated[samples] / real[samples] for samples in common])
    assert real[common[0]] > 1.5 * real[common[-1]], "there is a curve to compare"
    assert np.abs(np.log(ratios)).max() < 0.25
    assert ratios[-1] == pytest.approx(1.0, abs=0.1)
