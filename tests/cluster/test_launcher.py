"""What the launcher says while learners are missing, and the environment in which it starts them."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from roundelay.cluster.launcher import Launcher
from roundelay.cluster.learner_process import Program


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


def test_threads_of_a_learner_that_wait_sleep_and_all_learners_together_have_no_more_threads_than_cores(
    tmp_path, monkeypatch
):
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    launcher = Launcher(Program([], {}, tmp_path), mock.Mock(), [0, 1, 2])
    launcher._ticket = Path("ticket.json")
    environment = launcher._new_process(1)._environment
    assert (environment["OMP_WAIT_POLICY"], environment["OMP_NUM_THREADS"]) == ("PASSIVE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launcher._new_process(1)._environment["OMP_NUM_THREADS"] == "5"
