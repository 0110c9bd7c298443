"""What is told of the learners of a run while it is under way."""

from __future__ import annotations

import pytest

from roundelay.training import run_reporter
from roundelay.training.run_reporter import RunReporter


class Lines:
    """A display that remembers what it is told."""

    def __init__(self):
        self.said, self.elapsed_s, self.samples_seen = [], 1.0, 100

    def say(self, sentence):
        self.said.append(sentence)

    def gone(self, learner, how):
        pass


def died(learner, living, reason="NameError: name 'lables' is not defined"):
    return {
        "kind": "event",
        "event": "died",
        "learner": learner,
        "reason": reason,
        "living": living,
    }


@pytest.fixture
def clock(monkeypatch):
    """The reporter's time, in a list."""
    now = [100.0]
    monkeypatch.setattr(run_reporter.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def reporter(tmp_path):
    return RunReporter(Lines(), tmp_path / "metrics.jsonl", lambda launcher: None)


def test_an_error_that_ends_all_learners_is_not_told_learner_by_learner(reporter, clock, tmp_path):
    for learner in range(4):
        reporter.events.put(died(learner, 3 - learner))
        reporter.show_events()
        clock[0] += 0.3
    reporter.finish(all_failed=True)
    assert reporter._display.said == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_the_death_of_one_learner_is_told_when_no_other_follows(reporter, clock):
    reporter.events.put(died(2, 3))
    reporter.show_events()
    assert reporter._display.said == []
    clock[0] += run_reporter.HOLD_S
    reporter.show_events()
    assert reporter._display.said == ["learner 2 died (NameError: name 'lables' is not defined); 3 live"]


def test_a_kill_is_told_at_once(reporter, clock):
    reporter.events.put(died(2, 3, "killed by SIGKILL"))
    reporter.show_events()
    assert reporter._display.said == ["learner 2 died (killed by SIGKILL); 3 live"]


def test_a_death_just_before_the_end_of_a_run_that_others_finish_is_told(reporter, clock):
    reporter.events.put(died(2, 3))
    reporter.finish(all_failed=False)
    assert len(reporter._display.said) == 1
