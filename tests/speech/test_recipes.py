"""The recipes resolve, and the Switchboard recipe has the settings of the papers."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from roundelay.speech.flat_start import DIMENSIONS
from roundelay.speech.model import AcousticModel
from roundelay.training.recipes import resolve, table_of
from roundelay.training.schedule import Schedule


@pytest.mark.parametrize("name", ["an4", "an4/best", "fsdd", "switchboard"])
def test_recipes_of_real_corpora_resolve_where_data_is_given(name, tmp_path):
    config = resolve(table_of(name), [("settings.data", str(tmp_path))])
    assert config.settings.corpus == name.partition("/")[0]
    assert (config.strategy, config.topology) == ("adpsgd", "random-ring")


def test_the_recipe_for_your_own_recordings_trains_for_hundreds_of_steps(tmp_path):
    """With a minute of speech, the length of time for which the page gives its number of epochs."""
    page = (Path(__file__).parents[2] / "docs" / "speech.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = resolve(tomllib.loads(recipe), [("settings.data", str(tmp_path))])
    windows = 60 * 100 / config.settings.window
    assert config.budget.epochs * windows / (config.learners * config.data.batch) > 200
    assert (config.settings.labels, config.optimizer.name) == ("flat-start", "adam")


def test_the_switchboard_recipe_is_that_of_the_papers(tmp_path):
    config = resolve(table_of("switchboard"), [("settings.data", str(tmp_path))])
    with torch.device("meta"):
        model = AcousticModel(260, config.settings.states, config.settings.model)
    assert config.settings.features == ("logmel", "fmllr", "ivector")
    assert 3 * config.settings.logmel.bins + DIMENSIONS + config.settings.ivector.dimension == 260
    assert sum(weight.numel() for weight in model.parameters()) == 43_154_944
    batch = config.learners * config.data.batch
    assert (config.learners, batch, config.settings.window, config.budget.epochs) == (16, 2560, 21, 16)
    rate = Schedule(config.optimizer, config.schedule, batch=batch, epoch=100, total=1600)
    # Warm-up from 0.1 to 1.0 over ten epochs, then 1/√2 for each epoch.
    assert [rate.at(0), rate.at(999)] == pytest.approx([0.1, 1.0], rel=1e-2)
    assert [rate.at(100 * epoch) for epoch in (10, 11, 15)] == pytest.approx([2**-0.5, 0.5, 2**-3])
