"""The rendezvous without sockets, on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from roundelay.cluster.rendezvous.state import AWAY_S, NEVER_FORMED, RendezvousState
from roundelay.transport.heartbeats import BEAT_S, SILENCE_S


class FakeLine:
    """What a learner hears."""

    def __init__(self):
        self.heard, self.open, self._count = [], True, 0

    def send(self, message):
        self.heard.append(message)

    def hang_up(self):
        self.open = False

    def of(self, kind):
        return [message for message in self.heard if message["kind"] == kind]


class Bureau:
    """A desk, its clock, its events and the lines of learners."""

    def __init__(self, expected, parties=None, minimum=1):
        self.time, self.events, self.lines, self.numbers = 0.0, [], {}, {}
        parties = list(range(expected) if parties is None else parties)
        self.run = {"expected": expected, "parties": parties, "minimum": minimum}
        self.desk = RendezvousState(lambda: self.time, self.events.append, {"folder": "here"})

    def register(self, learner, generation=NEVER_FORMED, **more):
        line = self.lines[learner] = FakeLine()
        message = {"kind": "register", "n": 0, "id": learner, "address": ["host", 100], "generation": generation}
        message["run"] = self.run
        self.desk.handle(line, message | more)
        return line

    def join(self, learner):
        self.register(learner)
        self.desk.handle(self.lines[learner], {"kind": "arrived"})

    def ask(self, learner, kind, **content):
        """The number of the question, whose answer may come later."""
        number = self.numbers[learner] = self.numbers.get(learner, 0) + 1
        self.desk.handle(self.lines[learner], {"kind": kind, "n": number} | content)
        return number

    def answer(self, learner, number):
        answers = [m for m in self.lines[learner].of("answer") if m["n"] == number]
        return answers[0] if answers else None

    def now(self, learner, kind, **content):
        return self.answer(learner, self.ask(learner, kind, **content))

    def draw(self, learner, index, *, done=None, patient=False):
        answer = self.now(
            learner, "draw", group=learner, index=index, done=index if done is None else done, patient=patient
        )
        return answer and answer["number"]

    def wait(self, seconds, beating=()):
        while seconds > 0:
            self.time += BEAT_S
            seconds -= BEAT_S
            for learner in beating:
                self.desk.handle(self.lines[learner], {"kind": "beat"})
            self.desk.tick()

    def told(self):
        return [(event["event"], event["learner"]) for event in self.events]


def formed(size, **options):
    bureau = Bureau(size, **options)
    for learner in range(size):
        bureau.register(learner)
    return bureau


def test_learners_that_begin_together_wait_for_each_other():
    bureau = Bureau(2)
    first = bureau.register(0)
    assert not first.of("answer")
    bureau.register(1)
    (answer,) = first.of("answer")
    assert (answer["id"], answer["generation"], sorted(answer["living"]), answer["info"]) == (
        0,
        0,
        ["0", "1"],
        {"folder": "here"},
    )
    assert bureau.events == []


def test_a_silent_learner_is_dropped_and_the_others_hear_of_the_next_generation():
    bureau = formed(3)
    bureau.wait(SILENCE_S + 2 * BEAT_S, beating=(0, 2))
    assert bureau.told() == [("dropped", 1)]
    assert not bureau.lines[1].open
    (push,) = bureau.lines[0].of("membership")
    assert (push["generation"], sorted(push["living"])) == (1, ["0", "2"])


def test_a_learner_whose_connection_broke_may_come_back_in_time():
    bureau = formed(2)
    bureau.desk.closed(bureau.lines[1])
    bureau.wait(AWAY_S - BEAT_S, beating=(0,))
    again = bureau.register(1, generation=0, living={}, used=[], total=None)
    assert again.of("answer")[0]["generation"] == 0
    bureau.wait(AWAY_S, beating=(0, 1))
    assert bureau.events == []


def test_a_learner_that_stays_away_is_dead_and_told_so_when_it_wakes():
    bureau = formed(2)
    bureau.desk.closed(bureau.lines[1])
    bureau.wait(AWAY_S + 2 * BEAT_S, beating=(0,))
    assert bureau.told() == [("died", 1)]
    again = bureau.register(1, generation=0, living={}, used=[], total=None)
    assert "did not come back" in again.of("answer")[0]["dropped"]
    assert bureau.desk.living == [0]


def test_a_dead_learners_unfinished_chunk_goes_back_to_the_pool():
    bureau = formed(2)
    for learner in (0, 1):
        bureau.now(learner, "begin", total=4, used=[])
    assert [bureau.draw(0, 0), bureau.draw(1, 0), bureau.draw(1, 1), bureau.draw(0, 1)] == [0, 1, 2, 3]
    bureau.desk.died(1, "killed")
    assert bureau.events[0]["returned"] == 1
    assert [bureau.draw(0, 2), bureau.draw(0, 3)] == [2, None]


def test_a_patient_learner_waits_for_what_may_be_given_back():
    bureau = formed(2)
    for learner in (0, 1):
        bureau.now(learner, "begin", total=2, used=[])
    assert [bureau.draw(0, 0), bureau.draw(1, 0)] == [0, 1]
    question = bureau.ask(0, "draw", group=0, index=1, done=1, patient=True)
    assert bureau.answer(0, question) is None
    bureau.desk.died(1, "killed")
    assert bureau.answer(0, question)["number"] == 1
    assert bureau.now(0, "draw", group=0, index=2, done=2, patient=True)["number"] is None


def test_a_joining_learner_gets_the_next_number_and_the_others_hear_of_it():
    bureau = formed(2)
    line = bureau.lines["new"] = FakeLine()
    message = {"kind": "register", "n": 1, "id": None, "address": ["h", 1], "generation": NEVER_FORMED}
    bureau.desk.handle(line, message | {"run": bureau.run})
    (answer,) = line.of("answer")
    assert (answer["id"], sorted(answer["living"]), answer["joins"]) == (2, ["0", "1", "2"], True)
    assert bureau.told() == []  # it may still take a while
    bureau.desk.handle(line, {"kind": "arrived"})
    assert bureau.told() == [("joined", 2)]
    assert sorted(bureau.lines[0].of("membership")[0]["living"]) == ["0", "1", "2"]


def test_who_joins_a_meeting_of_synchronous_learners_arrives_by_meeting():
    bureau = formed(2)
    bureau.register(5)
    question = bureau.ask(5, "meet", address=["host", 7], value="new", lost=[], generation=0)
    assert bureau.told() == [("joined", 5)]
    assert bureau.lines[0].of("membership")  # which has the others meet, too
    for learner in (0, 1):
        bureau.ask(learner, "meet", address=["host", 7], value="old", lost=[], generation=0)
    assert bureau.answer(5, question)["values"] == {"0": "old", "1": "old", "5": "new"}


def test_who_is_lost_before_it_arrives_was_never_there():
    bureau = formed(2)
    bureau.register(5)
    bureau.desk.closed(bureau.lines[5])
    bureau.wait(SILENCE_S + 2 * BEAT_S, beating=(0, 1))
    assert bureau.told() == []
    assert bureau.desk.living == [0, 1]


def test_a_learner_that_is_started_again_before_its_death_was_noticed_takes_its_own_place():
    bureau = formed(2)
    bureau.join(1)
    assert bureau.told() == [("died", 1), ("joined", 1)]
    assert bureau.desk.living == [0, 1]


def test_a_learner_that_leaves_with_a_failure_has_died():
    bureau = formed(2)
    bureau.desk.handle(bureau.lines[0], {"kind": "bye", "failure": ""})
    bureau.desk.handle(bureau.lines[1], {"kind": "bye", "failure": "DivergedError: no finite gradient"})
    assert bureau.told() == [("left", 0), ("died", 1)]
    assert bureau.events[1]["reason"] == "DivergedError: no finite gradient"


def test_healed_is_told_when_all_that_live_have_taken_the_change_up():
    bureau = formed(3)
    bureau.desk.died(2, "killed")
    bureau.time += 0.25
    bureau.desk.handle(bureau.lines[0], {"kind": "healed", "generation": 1})
    assert bureau.told() == [("died", 2)]
    bureau.desk.handle(bureau.lines[1], {"kind": "healed", "generation": 1})
    assert bureau.told() == [("died", 2), ("healed", None)]
    assert bureau.events[-1]["seconds"] == 0.25


def test_a_meeting_begins_when_all_that_live_are_there_and_brings_their_values():
    bureau = formed(3)
    questions = {
        learner: bureau.ask(learner, "meet", address=["host", 7], value=learner * 10, lost=[2], generation=0)
        for learner in (0, 1)
    }
    assert bureau.answer(0, questions[0]) is None
    bureau.desk.died(2, "killed")
    answer = bureau.answer(0, questions[0])
    assert answer["values"] == {"0": 0, "1": 10}
    assert answer == bureau.answer(1, questions[1]) | {"n": questions[0]}
    assert answer["generation"] == 2  # one for the death, one for the meeting


def test_of_two_living_learners_that_cannot_reach_each_other_one_goes():
    bureau = formed(3)
    lost = {0: [1], 1: [0], 2: []}
    questions = {
        learner: bureau.ask(learner, "meet", address=["host", 7], value=None, lost=lost[learner], generation=0)
        for learner in lost
    }
    assert bureau.told() == [("dropped", 1)]
    assert sorted(bureau.answer(0, questions[0])["living"]) == ["0", "2"]


def test_nobody_is_blamed_for_what_its_forerunner_did():
    bureau = formed(2)
    bureau.desk.died(1, "killed")
    bureau.join(1)
    question = bureau.ask(0, "meet", address=["host", 7], value=None, lost=[1], generation=0)
    bureau.ask(1, "meet", address=["host", 7], value=None, lost=[], generation=2)
    assert sorted(bureau.answer(0, question)["living"]) == ["0", "1"]


def test_a_party_ends_with_the_furthest_step_that_one_of_it_has_begun():
    bureau = formed(4, parties=[0, 0, 1, 1])
    first = bureau.ask(0, "last_step", begun=7)
    other = bureau.ask(2, "last_step", begun=3)
    assert bureau.now(3, "last_step", begun=1)["number"] == 3
    assert bureau.answer(2, other)["number"] == 3
    assert bureau.answer(0, first) is None
    assert bureau.now(1, "last_step", begun=9)["number"] == 9
    assert bureau.answer(0, first)["number"] == 9


def test_a_learner_that_is_gone_stops_nobody_from_stopping():
    bureau = formed(2, parties=[0, 0])
    question = bureau.ask(0, "last_step", begun=5)
    bureau.desk.died(1, "killed")
    assert bureau.answer(0, question)["number"] == 5


def test_all_that_stop_hear_one_mark():
    bureau = formed(2)
    bureau.now(0, "begin", total=10, used=[])
    bureau.draw(0, 0)
    assert bureau.now(0, "mark")["number"] == 1
    bureau.draw(0, 1)
    assert bureau.now(1, "mark")["number"] == 1


def test_with_fewer_than_the_minimum_the_run_is_stopped():
    bureau = formed(3, minimum=2)
    bureau.desk.died(2, "killed")
    assert not bureau.lines[0].of("stop")
    bureau.desk.died(1, "killed")
    (stop,) = bureau.lines[0].of("stop")
    assert stop["reason"] == "1 learners live, fewer than the 2 that the run needs"


def test_a_restarted_rendezvous_is_rebuilt_from_what_learners_tell():
    bureau = Bureau(3)
    living = {str(learner): ["host", learner] for learner in range(3)}
    told = {"living": living, "total": 6}
    bureau.register(0, generation=4, used=[0, 3], **told)
    assert bureau.lines[0].of("answer")[0]["generation"] == 5
    question = bureau.ask(0, "draw", group=0, index=0, done=0, patient=False)
    assert bureau.answer(0, question) is None  # learners 1 and 2 have not told yet what they have used
    bureau.register(1, generation=4, used=[1], **told)
    bureau.wait(AWAY_S + 2 * BEAT_S, beating=(0, 1))
    assert bureau.told() == [("died", 2)]
    assert bureau.answer(0, question)["number"] == 2


EVENTS = st.lists(
    st.tuples(st.sampled_from(["draw", "die", "freeze", "join", "wait", "leave"]), st.integers(0, 5)), max_size=60
)


@settings(max_examples=150)
@given(events=EVENTS, total=st.integers(1, 25))
def test_whatever_happens_every_number_is_done_and_generations_grow(events, total):  # noqa: PLR0912
    """Learners draw, die, freeze and join at random; those that are left at the end do what is left."""
    bureau = formed(3)
    for learner in range(3):
        bureau.now(learner, "begin", total=total, used=[])
    asked, frozen, done = dict.fromkeys(range(3), 0), set(), set()
    generations = [0]

    def draw(learner):
        number = bureau.draw(learner, asked[learner])
        if number is not None:
            asked[learner] += 1
            under_way[learner] = number

    under_way = {}
    for event, which in events:
        active = [learner for learner in bureau.desk.living if learner not in frozen]
        learner = active[which % len(active)] if active else None
        if event == "join" and len(bureau.desk.living) < 6:
            number = max([*asked, 2]) + 1
            bureau.join(number)
            asked[number] = 0
        elif learner is None:
            continue
        elif event == "draw":
            if learner in under_way:
                done.add(under_way.pop(learner))
            draw(learner)
        elif event == "die" and len(bureau.desk.living) > 1:
            under_way.pop(learner, None)
            bureau.desk.died(learner, "killed")
        elif event == "leave" and len(active) > 1 and learner not in under_way:
            bureau.desk.handle(bureau.lines[learner], {"kind": "bye", "failure": ""})
        elif event == "freeze" and len(active) > 1:
            frozen.add(learner)
            under_way.pop(learner, None)
        elif event == "wait":
            bureau.wait(SILENCE_S + 2 * BEAT_S, beating=active)
        generations.append(bureau.desk.generation)
    bureau.wait(SILENCE_S + 2 * BEAT_S, beating=[i for i in bureau.desk.living if i not in frozen])
    assert not frozen.intersection(bureau.desk.living)
    for learner in bureau.desk.living:
        if learner in under_way:
            done.add(under_way.pop(learner))
    if not bureau.desk.living:
        return
    last = bureau.desk.living[0]
    for learner in bureau.desk.living[1:]:  # what they have done is told with their next question
        bureau.ask(learner, "draw", group=learner, index=asked[learner], done=asked[learner], patient=False)
    for learner in bureau.desk.living[1:]:
        bureau.desk.died(learner, "killed")
    while (number := bureau.draw(last, asked[last])) is not None:
        done.add(number)
        asked[last] += 1
    assert done == set(range(total))
    assert generations == sorted(generations)


@pytest.mark.parametrize(
    "message", [{"kind": "draw", "n": 1}, {"kind": "register", "n": 1, "id": "x", "generation": "y"}]
)
def test_a_message_without_what_it_needs_raises_and_changes_nothing(message):
    bureau = formed(2)
    bureau.now(0, "begin", total=3, used=[])
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        bureau.desk.handle(bureau.lines[0], message)
    assert bureau.desk.living == [0, 1]
    assert bureau.draw(1, 0) == 0  # and what others ask is answered
