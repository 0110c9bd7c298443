from __future__ import annotations

import dataclasses

import pytest

from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.training import recipes
from roundelay.training.recipes import resolve, table_of
from roundelay.training.worker import WorkerSpec, run_spec


def spec_of(config, **changes):
    values = {
        "config": recipes.as_table(config),
        "folder": "runs/a",
        "resume_at": 2600,
        "rendezvous": ("10.0.0.1", 29400),
        "security": {"ROUNDELAY_SECRET": "5e" * 32, "ROUNDELAY_RUN": ""},
        "host": "10.0.0.2",
        "learner": None,
        "local_rank": 1,
        "local_size": 2,
    }
    return WorkerSpec(**values | changes)


@pytest.mark.parametrize("recipe", ["tiny", "synth"])
def test_a_worker_receives_the_configuration_that_the_supervisor_has_checked(recipe):
    config = resolve(table_of(recipe), [("learners", "3")])
    sent = spec_of(config)
    received = WorkerSpec.from_line(sent.to_line())
    assert dataclasses.replace(received, config=sent.config) == sent
    assert recipes.as_table(recipes.from_table(received.config)) == recipes.as_table(config)


def test_the_specification_is_one_line():
    line = spec_of(resolve(table_of("tiny")), folder="runs/a\nb").to_line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


@pytest.mark.parametrize(
    ("settings", "stop_groups"),
    [
        ({"strategy": "dpsgd"}, (0, 0, 0, 0)),
        ({"strategy": "adpsgd"}, (0, 1, 2, 3)),
        ({"strategy": "adpsgd", "group_size": "2"}, (0, 0, 1, 1)),
    ],
)
def test_learners_that_step_together_are_one_stop_group(settings, stop_groups):
    config = resolve(table_of("tiny"), [("learners", "4"), ("min_learners", "2"), *settings.items()])
    assert run_spec(config) == RunSpec(expected=4, stop_groups=stop_groups, min_learners=2)
