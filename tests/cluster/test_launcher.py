"""What the launcher says while learners are missing."""

from __future__ import annotations

from unittest import mock

from roundelay.cluster.launcher import Launcher


def test_it_is_said_at_once_when_no_learner_is_missing_any_more():
    """Not only at the next look some seconds later, when a short run may have ended."""
    said: list[str] = []
    rendezvous = mock.Mock()
    rendezvous.waiting.side_effect = ["learner 1 is missing", "learner 1 is missing", "", ""]
    launcher = Launcher(mock.Mock(), rendezvous, [0, 1], reporter=mock.Mock(say=said.append))
    launcher._next_look_s = 0.0
    for _ in range(4):
        launcher._say_which_are_missing()
    assert said == ["learner 1 is missing", "all learners are here"]
