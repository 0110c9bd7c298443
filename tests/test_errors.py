"""Errors say what came, what is allowed and what to do."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from roundelay import errors
from roundelay.errors import (
    MissingExtraError,
    MissingLearnersError,
    PeerLostError,
    RefusedError,
    RoundelayError,
    TopologyError,
    unknown,
)


def test_unknown_names_the_nearest():
    assert (
        unknown("topology", "rnig", ["ring", "star"])
        == "unknown topology 'rnig'; did you mean 'ring'? Known: ring, star"
    )


def test_unknown_guesses_nothing_far_fetched():
    assert unknown("topology", "xyz", ["ring", "star"]) == "unknown topology 'xyz'. Known: ring, star"


def test_a_missing_extra_says_how_to_install_it():
    assert str(MissingExtraError("drawing", "plots")) == (
        "drawing needs the 'plots' extra; install it with: pip install 'roundelay[plots]'"
    )


TWO_ARGUMENTS = {
    PeerLostError: (3, "it froze"),
    RefusedError: (2, "checksum"),
    MissingExtraError: ("drawing", "plots"),
    MissingLearnersError: (2.5, [1, 3]),
}


def classes():
    return [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", classes())
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_of_another_process_arrives_as_it_was(kind, again):
    error = kind(*TWO_ARGUMENTS.get(kind, ("what came, what is allowed",)))
    error.where = "learner 3"
    arrived = again(error)
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_wrong_topologies_are_value_errors_to_those_who_do_not_know_us():
    assert issubclass(TopologyError, ValueError)


def test_every_error_is_a_roundelay_error_and_stands_in_the_drawing():
    assert all(issubclass(found, RoundelayError) for found in classes())
    assert all(found.__name__ in errors.__doc__ for found in classes())
