"""A rendezvous refuses numbers that no run has."""

from __future__ import annotations

import pytest

from roundelay.cluster.elastic_world import Rendezvous
from roundelay.errors import LaunchError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learners": 0}, "a run needs at least 1 learner, got 0"),
        ({"learners": 2, "min_learners": 3}, "a run of 2 learners needs 1 to 2 as min_learners, got 3"),
        ({"learners": 2, "port": 99999}, "cannot listen on 127.0.0.1:99999: a port is a number from 0 to 65535"),
    ],
)
def test_a_number_that_no_run_has_is_refused_with_what_is_allowed(settings, message):
    with pytest.raises(LaunchError) as refused:
        Rendezvous(**settings)
    assert str(refused.value) == message
