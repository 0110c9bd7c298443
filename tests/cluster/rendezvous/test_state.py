"""The rendezvous without sockets, on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from roundelay.cluster.rendezvous.formation import AFTER_FINISHED_S
from roundelay.cluster.rendezvous.members import NEVER_FORMED
from roundelay.cluster.rendezvous.registration import AHEAD
from roundelay.cluster.rendezvous.silence import ALL_SILENT_S, AWAY_S
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.transport.heartbeats import BEAT_S, LOST_AFTER_S


class FakeConnection:
    """Records what a learner receives."""

    def __init__(self):
        self.received, self.open, self._count = [], True, 0

    def send(self, message):
        self.received.append(message)

    def shut_down(self):
        self.open = False

    def of(self, kind):
        return [message for message in self.received if message["kind"] == kind]


class Rendezvous:
    """A state, its clock, its events and the connections of learners."""

    def __init__(self, expected, stop_groups=None, min_learners=1, identity="first"):
        self.time, self.events, self.connections, self.numbers = 0.0, [], {}, {}
        stop_groups = list(range(expected) if stop_groups is None else stop_groups)
        self.run = {
            "expected": expected,
            "stop_groups": stop_groups,
            "min_learners": min_learners,
            "identity": identity,
        }
        self.state = RendezvousState(lambda: self.time, self.events.append)

    def register(self, learner, generation=NEVER_FORMED, **more):
        connection = self.connections[learner] = FakeConnection()
        message = {"kind": "register", "request": 0, "id": learner, "address": ["host", 100], "generation": generation}
        message["run"] = self.run
        self.state.handle(connection, message | more)
        return connection

    def join(self, learner):
        self.register(learner)
        self.state.handle(self.connections[learner], {"kind": "ready"})

    def ask(self, learner, kind, **content):
        """The number of the request, whose answer may come later."""
        number = self.numbers[learner] = self.numbers.get(learner, 0) + 1
        self.state.handle(self.connections[learner], {"kind": kind, "request": number} | content)
        return number

    def answer(self, learner, number):
        answers = [m for m in self.connections[learner].of("reply") if m["request"] == number]
        return answers[0] if answers else None

    def now(self, learner, kind, **content):
        return self.answer(learner, self.ask(learner, kind, **content))

    def draw(self, learner, index, *, done=None, patient=False):
        answer = self.now(
            learner, "draw", group=learner, index=index, done=index if done is None else done, patient=patient
        )
        return answer and answer["number"]

    def wait(self, seconds, heartbeats_of=()):
        while seconds > 0:
            self.time += BEAT_S
            seconds -= BEAT_S
            for learner in heartbeats_of:
                self.state.handle(self.connections[learner], {"kind": "heartbeat"})
            self.state.tick()

    def reported(self):
        return [(event["event"], event["learner"]) for event in self.events]


def formed(size, **options):
    rendezvous = Rendezvous(size, **options)
    for learner in range(size):
        rendezvous.register(learner)
    return rendezvous


def test_learners_that_begin_together_wait_for_each_other():
    rendezvous = Rendezvous(2)
    first = rendezvous.register(0)
    assert not first.of("reply")
    rendezvous.register(1)
    (answer,) = first.of("reply")
    assert (answer["id"], answer["generation"], sorted(answer["living"])) == (0, 0, ["0", "1"])
    assert rendezvous.events == []


def test_a_process_may_ask_what_learners_have_said_about_the_run():
    rendezvous, stranger = Rendezvous(1), FakeConnection()
    rendezvous.run["about"] = {"folder": "here"}
    rendezvous.register(0, files=["10.0.0.1", 99])
    rendezvous.state.handle(stranger, {"kind": "info", "request": 0})
    said = {"folder": "here", "files": {"0": ("10.0.0.1", 99)}}
    assert stranger.of("reply")[0]["info"] == said | {"run": "first", "waiting": "", "under_way": True}


def test_a_silent_learner_is_dropped_and_the_others_receive_the_next_generation():
    rendezvous = formed(3)
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=(0, 2))
    assert rendezvous.reported() == [("dropped", 1)]
    assert not rendezvous.connections[1].open
    (push,) = rendezvous.connections[0].of("view")
    assert (push["generation"], sorted(push["living"])) == (1, ["0", "2"])


def test_a_learner_whose_connection_broke_may_come_back_in_time():
    rendezvous = formed(2)
    rendezvous.state.closed(rendezvous.connections[1])
    rendezvous.wait(AWAY_S - BEAT_S, heartbeats_of=(0,))
    again = rendezvous.register(1, generation=0, living={}, used=[], total=None)
    assert again.of("reply")[0]["generation"] == 0
    rendezvous.wait(AWAY_S, heartbeats_of=(0, 1))
    assert rendezvous.events == []


def test_a_learner_that_stays_away_is_dead_and_learns_so_when_it_registers_again():
    rendezvous = formed(2)
    rendezvous.state.closed(rendezvous.connections[1])
    rendezvous.wait(AWAY_S + 2 * BEAT_S, heartbeats_of=(0,))
    assert rendezvous.reported() == [("died", 1)]
    again = rendezvous.register(1, generation=0, living={}, used=[], total=None)
    assert "did not come back" in again.of("reply")[0]["dropped"]
    assert rendezvous.state.living == [0]


def test_a_dead_learners_unfinished_chunk_goes_back_to_the_pool():
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.now(learner, "budget", total=4, used=[])
    assert [rendezvous.draw(0, 0), rendezvous.draw(1, 0), rendezvous.draw(1, 1), rendezvous.draw(0, 1)] == [0, 1, 2, 3]
    rendezvous.state.died(1, "killed")
    assert rendezvous.events[0]["returned"] == 1
    assert [rendezvous.draw(0, 2), rendezvous.draw(0, 3)] == [2, None]


def test_a_patient_draw_waits_for_numbers_that_may_be_given_back():
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.now(learner, "budget", total=2, used=[])
    assert [rendezvous.draw(0, 0), rendezvous.draw(1, 0)] == [0, 1]
    request = rendezvous.ask(0, "draw", group=0, index=1, done=1, patient=True)
    assert rendezvous.answer(0, request) is None
    rendezvous.state.died(1, "killed")
    assert rendezvous.answer(0, request)["number"] == 1
    assert rendezvous.now(0, "draw", group=0, index=2, done=2, patient=True)["number"] is None


def test_a_joining_learner_gets_the_next_id_and_the_others_hear_of_it_once_it_is_ready():
    rendezvous = formed(2)
    connection = rendezvous.connections["new"] = FakeConnection()
    message = {"kind": "register", "request": 1, "id": None, "address": ["h", 1], "generation": NEVER_FORMED}
    rendezvous.state.handle(connection, message | {"run": rendezvous.run})
    (answer,) = connection.of("reply")
    assert (answer["id"], sorted(answer["living"]), answer["joining"]) == (2, ["0", "1", "2"], True)
    assert rendezvous.reported() == []  # it may still take a while
    rendezvous.state.handle(connection, {"kind": "ready"})
    assert rendezvous.reported() == [("joined", 2)]
    assert sorted(rendezvous.connections[0].of("view")[0]["living"]) == ["0", "1", "2"]


def test_a_joining_learner_that_waits_at_the_barrier_is_ready():
    rendezvous = formed(2)
    rendezvous.register(5)
    request = rendezvous.ask(5, "barrier", address=["host", 7], value="new", lost=[], generation=0)
    assert rendezvous.reported() == [("joined", 5)]
    assert rendezvous.connections[0].of("view")  # so that the others come to the barrier as well
    for learner in (0, 1):
        rendezvous.ask(learner, "barrier", address=["host", 7], value="old", lost=[], generation=0)
    assert rendezvous.answer(5, request)["values"] == {"0": "old", "1": "old", "5": "new"}


def test_a_joining_learner_that_is_lost_before_it_is_ready_is_never_reported():
    rendezvous = formed(2)
    rendezvous.register(5)
    rendezvous.state.closed(rendezvous.connections[5])
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=(0, 1))
    assert rendezvous.reported() == []
    assert rendezvous.state.living == [0, 1]


def test_a_learner_restarted_before_its_death_was_noticed_keeps_its_id():
    rendezvous = formed(2)
    rendezvous.join(1)
    assert rendezvous.reported() == [("died", 1), ("joined", 1)]
    assert rendezvous.state.living == [0, 1]


def test_a_learner_that_leaves_with_a_failure_has_died():
    rendezvous = formed(2)
    rendezvous.state.handle(rendezvous.connections[0], {"kind": "leave", "failure": ""})
    rendezvous.state.handle(
        rendezvous.connections[1], {"kind": "leave", "failure": "DivergedError: no finite gradient"}
    )
    assert rendezvous.reported() == [("left", 0), ("died", 1)]
    assert rendezvous.events[1]["reason"] == "DivergedError: no finite gradient"


def test_recovered_is_reported_once_all_living_learners_have_adopted_the_change():
    rendezvous = formed(3)
    rendezvous.state.died(2, "killed")
    rendezvous.time += 0.25
    rendezvous.state.handle(rendezvous.connections[0], {"kind": "view_adopted", "generation": 1})
    assert rendezvous.reported() == [("died", 2)]
    rendezvous.state.handle(rendezvous.connections[1], {"kind": "view_adopted", "generation": 1})
    assert rendezvous.reported() == [("died", 2), ("recovered", None)]
    assert rendezvous.events[-1]["seconds"] == 0.25


def test_a_barrier_opens_when_all_living_learners_wait_and_gives_their_values():
    rendezvous = formed(3)
    requests = {
        learner: rendezvous.ask(learner, "barrier", address=["host", 7], value=learner * 10, lost=[2], generation=0)
        for learner in (0, 1)
    }
    assert rendezvous.answer(0, requests[0]) is None
    rendezvous.state.died(2, "killed")
    answer = rendezvous.answer(0, requests[0])
    assert answer["values"] == {"0": 0, "1": 10}
    assert answer == rendezvous.answer(1, requests[1]) | {"request": requests[0]}
    assert answer["generation"] == 2  # one for the death, one for the barrier


def test_a_barrier_s_reply_that_was_lost_with_its_connection_is_sent_again():
    rendezvous = formed(2)
    where = {"address": ["host", 7], "value": 5, "lost": [], "generation": 0}
    first = rendezvous.ask(0, "barrier", **where)
    rendezvous.ask(1, "barrier", **where)
    answer = rendezvous.answer(0, first)
    rendezvous.state.closed(rendezvous.connections[0])
    again = rendezvous.register(0, generation=0)
    rendezvous.state.handle(again, {"kind": "barrier", "request": first} | where)
    assert rendezvous.answer(0, first) == answer
    assert rendezvous.now(0, "barrier", **where) is None  # the next barrier waits for learner 1


def test_a_number_whose_reply_was_lost_with_its_connection_is_given_out_again():
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.now(learner, "budget", total=4, used=[])
    assert [rendezvous.draw(0, 0), rendezvous.draw(0, 1), rendezvous.draw(1, 0)] == [0, 1, 2]
    rendezvous.state.closed(rendezvous.connections[0])  # number 1 did not arrive, so learner 0 took 3 by itself
    rendezvous.register(0, generation=0, used=[], group=0, drawn=[[0, 0], [1, 3]], done=1, total=4)
    assert [rendezvous.draw(1, 1), rendezvous.draw(1, 2)] == [1, None]


def test_of_two_learners_that_cannot_reach_each_other_one_is_dropped():
    rendezvous = formed(3)
    lost = {0: [1], 1: [0], 2: []}
    requests = {
        learner: rendezvous.ask(learner, "barrier", address=["host", 7], value=None, lost=lost[learner], generation=0)
        for learner in lost
    }
    assert rendezvous.reported() == [("dropped", 1)]
    assert sorted(rendezvous.answer(0, requests[0])["living"]) == ["0", "2"]


def test_a_restarted_learner_is_not_dropped_because_its_predecessor_was_lost():
    rendezvous = formed(2)
    rendezvous.state.died(1, "killed")
    rendezvous.join(1)
    request = rendezvous.ask(0, "barrier", address=["host", 7], value=None, lost=[1], generation=0)
    rendezvous.ask(1, "barrier", address=["host", 7], value=None, lost=[], generation=2)
    assert sorted(rendezvous.answer(0, request)["living"]) == ["0", "1"]


def test_a_stop_group_ends_with_the_furthest_step_that_one_of_it_has_begun():
    rendezvous = formed(4, stop_groups=[0, 0, 1, 1])
    first = rendezvous.ask(0, "last_step", begun=7)
    other = rendezvous.ask(2, "last_step", begun=3)
    assert rendezvous.now(3, "last_step", begun=1)["number"] == 3
    assert rendezvous.answer(2, other)["number"] == 3
    assert rendezvous.answer(0, first) is None
    assert rendezvous.now(1, "last_step", begun=9)["number"] == 9
    assert rendezvous.answer(0, first)["number"] == 9


def test_a_lost_learner_does_not_keep_the_others_from_stopping():
    rendezvous = formed(2, stop_groups=[0, 0])
    request = rendezvous.ask(0, "last_step", begun=5)
    rendezvous.state.died(1, "killed")
    assert rendezvous.answer(0, request)["number"] == 5


def test_all_learners_that_stop_get_the_same_boundary():
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.now(learner, "budget", total=10, used=[])
    rendezvous.draw(0, 0)
    assert rendezvous.now(0, "stop_boundary")["number"] == 1
    rendezvous.draw(0, 1)
    assert rendezvous.now(1, "stop_boundary")["number"] == 1


def test_with_fewer_than_min_learners_the_run_is_stopped():
    rendezvous = formed(3, min_learners=2)
    rendezvous.state.died(2, "killed")
    assert not rendezvous.connections[0].of("stop")
    rendezvous.state.died(1, "killed")
    (stop,) = rendezvous.connections[0].of("stop")
    assert stop["reason"] == "1 learners live, fewer than the 2 that the run needs"


def test_a_restarted_rendezvous_rebuilds_its_state_from_the_learners():
    rendezvous = Rendezvous(3)
    living = {str(learner): ["host", learner] for learner in range(3)}
    known = {"living": living, "total": 6, "used": [0], "done": 1}
    rendezvous.register(0, generation=4, group=0, drawn=[[0, 3]], **known)
    assert rendezvous.connections[0].of("reply")[0]["generation"] == 4 + AHEAD
    request = rendezvous.ask(0, "draw", group=0, index=1, done=1, patient=False)
    assert rendezvous.answer(0, request) is None  # learners 1 and 2 have not said yet what they have used
    rendezvous.register(1, generation=4, group=1, drawn=[[0, 1]], **known)
    rendezvous.wait(AWAY_S + 2 * BEAT_S, heartbeats_of=(0, 1))
    assert rendezvous.reported() == [("died", 2)]
    assert rendezvous.answer(0, request)["number"] == 2


def test_after_a_restart_of_the_rendezvous_it_does_not_matter_who_comes_first():
    """Learner 1 had not asked for a number yet."""
    rendezvous = Rendezvous(2)
    living = {str(learner): ["host", learner] for learner in range(2)}
    rendezvous.register(1, generation=4, living=living, total=None, used=[])
    rendezvous.register(0, generation=4, living=living, total=3, used=[], group=0, drawn=[[0, 0]], done=1)
    first = rendezvous.ask(0, "draw", group=0, index=1, done=1, patient=False)
    assert rendezvous.answer(0, first) is None  # learner 1 may have used some
    rendezvous.now(1, "budget", total=3, used=[])
    assert rendezvous.answer(0, first)["number"] == 1
    assert rendezvous.draw(1, 0) == 2


@pytest.mark.parametrize("taken", [1, 3], ids=["asked", "unasked"])
def test_what_a_learner_had_not_finished_when_it_died_is_given_out_again_also_if_it_had_connected_again(taken):
    """Unasked: the rendezvous was away, and the learner took number 3 by itself."""
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.now(learner, "budget", total=4, used=[])
    assert [rendezvous.draw(0, 0), rendezvous.draw(0, 1)] == [0, 1]
    rendezvous.state.closed(rendezvous.connections[0])
    rendezvous.register(0, generation=0, total=4, used=[], group=0, drawn=[[0, 0], [1, taken]], done=1)
    rendezvous.state.died(0, "killed by SIGKILL")
    assert sorted(rendezvous.draw(1, index) for index in range(3)) == [1, 2, 3]
    assert rendezvous.draw(1, 3) is None


def test_a_number_that_a_learner_did_not_receive_is_given_out_again_whatever_others_have():
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.now(learner, "budget", total=2, used=[])
    rendezvous.register(1, generation=0, total=2, used=[], group=None, drawn=[], done=0)  # it has not drawn
    assert rendezvous.draw(0, 0) == 0
    rendezvous.register(0, generation=0, total=2, used=[], group=0, drawn=[], done=0)  # the reply was lost
    assert rendezvous.draw(1, 0) == 0


def leave(rendezvous, learner):
    rendezvous.state.handle(rendezvous.connections[learner], {"kind": "leave", "failure": ""})


def replied(connection):
    (reply,) = connection.of("reply")
    return reply


def test_learners_that_are_silent_all_at_once_are_not_dropped():
    rendezvous = formed(3)
    rendezvous.wait(ALL_SILENT_S - 2 * BEAT_S)
    rendezvous.wait(LOST_AFTER_S / 2, heartbeats_of=[1])  # one wakes first; the others have time to follow
    rendezvous.wait(3 * LOST_AFTER_S, heartbeats_of=[0, 1, 2])
    assert rendezvous.events == []


def test_learners_that_do_not_follow_the_first_that_wakes_are_dropped():
    rendezvous = formed(3)
    rendezvous.wait(3 * LOST_AFTER_S)
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=[1])
    assert sorted(rendezvous.reported()) == [("dropped", 0), ("dropped", 2)]


def test_a_silent_learner_is_dropped_if_one_with_weights_of_the_run_wants_to_go_on():
    rendezvous = formed(2)
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=[1])
    assert replied(rendezvous.register(0, joins=True, weights=True))["joining"]
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=[0])
    assert rendezvous.reported() == [("dropped", 0), ("dropped", 1)]
    assert not replied(rendezvous.register(0, joins=True, weights=True))["joining"]
    assert rendezvous.state.living == [0]


def all_dropped(learners):
    rendezvous = formed(learners)
    rendezvous.wait(ALL_SILENT_S + LOST_AFTER_S + 2 * BEAT_S)
    assert rendezvous.state.living == []
    return rendezvous


def test_if_all_were_dropped_the_first_that_comes_back_goes_on_and_the_others_join_it():
    rendezvous = all_dropped(3)
    told = replied(rendezvous.register(1, generation=0, living={}, used=[], total=None))
    assert told["dropped"] == "no heartbeat for 5 s"  # it connects again as soon as it wakes
    first = replied(rendezvous.register(1, joins=True, weights=True))
    assert (first["joining"], sorted(first["living"])) == (False, ["1"])
    second = replied(rendezvous.register(0, joins=True, weights=True))
    assert (second["joining"], sorted(second["living"])) == (True, ["0", "1"])
    rendezvous.state.handle(rendezvous.connections[0], {"kind": "ready"})
    assert rendezvous.state.living == [0, 1]
    assert rendezvous.state.generation > first["generation"] > 3


def test_a_learner_without_weights_cannot_go_on_with_a_run_whose_learners_were_all_dropped():
    rendezvous = all_dropped(2)
    assert "no learner left" in replied(rendezvous.register(0, joins=True, weights=False))["refused"]
    assert "no learner left" in replied(rendezvous.register(5, joins=True))["refused"]


def test_a_learner_that_was_dropped_joins_those_that_train_on_although_another_one_has_left():
    rendezvous = formed(3)
    leave(rendezvous, 2)
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=[0])
    assert replied(rendezvous.register(1, joins=True, weights=True))["joining"]


def test_a_learner_that_was_dropped_tries_again_if_the_rendezvous_was_started_again_meanwhile():
    rendezvous = Rendezvous(3)
    assert "started again" in replied(rendezvous.register(2, joins=True, weights=True))["dropped"]
    living = {str(learner): ["host", learner] for learner in range(2)}
    for learner in (0, 1):
        rendezvous.register(learner, generation=4, living=living, used=[], total=None)
    assert replied(rendezvous.register(2, joins=True, weights=True))["joining"]


def test_a_learner_that_wakes_after_the_run_has_finished_is_refused():
    rendezvous = formed(2)
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=[0])
    leave(rendezvous, 0)
    assert "all have finished" in replied(rendezvous.register(1, joins=True, weights=True))["refused"]


@pytest.mark.parametrize("waits_at_barrier", ["before_they_leave", "after_they_have_left"])
def test_a_learner_that_wakes_while_the_others_finish_does_not_begin_the_run_again(waits_at_barrier):
    rendezvous = formed(3)
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=[0, 2])
    assert replied(rendezvous.register(1, joins=True, weights=True))["joining"]
    meeting = {"value": None, "lost": [], "generation": 1, "address": ["host", 1]}
    if waits_at_barrier == "before_they_leave":
        rendezvous.ask(1, "barrier", **meeting)
    leave(rendezvous, 0)
    leave(rendezvous, 2)
    if waits_at_barrier == "after_they_have_left":
        rendezvous.ask(1, "barrier", **meeting)
    assert not rendezvous.connections[1].of("reply")[1:]
    assert not rendezvous.connections[1].open
    assert rendezvous.reported()[-1] == ("dropped", 1)
    told = replied(rendezvous.register(1, generation=2, living={}, used=[], total=None))
    assert told["dropped"] == "all other learners have finished"
    assert "all have finished" in replied(rendezvous.register(1, joins=True, weights=True))["refused"]


def test_time_in_which_the_rendezvous_stood_still_does_not_count_for_a_connection_that_broke():
    rendezvous = formed(2)
    rendezvous.wait(BEAT_S, heartbeats_of=[0, 1])
    rendezvous.state.closed(rendezvous.connections[1])
    rendezvous.time += 60.0
    rendezvous.state.tick()
    assert rendezvous.state.living == [0, 1]
    rendezvous.wait(AWAY_S + 2 * BEAT_S, heartbeats_of=[0])
    assert rendezvous.reported() == [("died", 1)]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["draw", "die", "freeze", "join", "wait", "leave"]), st.integers(0, 5)), max_size=60
)


@settings(max_examples=150)
@given(events=EVENTS, total=st.integers(1, 25))
def test_whatever_happens_every_number_is_used_and_generations_grow(events, total):  # noqa: PLR0912
    """Learners draw, die, freeze and join at random; those that are left at the end do what is left."""
    rendezvous = formed(3)
    for learner in range(3):
        rendezvous.now(learner, "budget", total=total, used=[])
    asked, frozen, done = dict.fromkeys(range(3), 0), set(), set()
    generations = [0]

    def draw(learner):
        number = rendezvous.draw(learner, asked[learner])
        if number is not None:
            asked[learner] += 1
            under_way[learner] = number

    under_way = {}
    for event, which in events:
        active = [learner for learner in rendezvous.state.living if learner not in frozen]
        learner = active[which % len(active)] if active else None
        if event == "join" and len(rendezvous.state.living) < 6:
            number = max([*asked, 2]) + 1
            rendezvous.join(number)
            asked[number] = 0
        elif learner is None:
            continue
        elif event == "draw":
            if learner in under_way:
                done.add(under_way.pop(learner))
            draw(learner)
        elif event == "die" and len(rendezvous.state.living) > 1:
            under_way.pop(learner, None)
            rendezvous.state.died(learner, "killed")
        elif event == "leave" and len(active) > 1 and learner not in under_way:
            rendezvous.state.handle(rendezvous.connections[learner], {"kind": "leave", "failure": ""})
        elif event == "freeze" and len(active) > 1:
            frozen.add(learner)
            under_way.pop(learner, None)
        elif event == "wait":
            rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S, heartbeats_of=active)
        generations.append(rendezvous.state.generation)
    awake = [learner for learner in rendezvous.state.living if learner not in frozen]
    rendezvous.wait(LOST_AFTER_S + 2 * BEAT_S + (0 if awake else ALL_SILENT_S), heartbeats_of=awake)
    assert not frozen.intersection(rendezvous.state.living)
    for learner in rendezvous.state.living:
        if learner in under_way:
            done.add(under_way.pop(learner))
    if not rendezvous.state.living:
        return
    last = rendezvous.state.living[0]
    for learner in rendezvous.state.living[1:]:  # their next request says what they have done
        rendezvous.ask(learner, "draw", group=learner, index=asked[learner], done=asked[learner], patient=False)
    for learner in rendezvous.state.living[1:]:
        rendezvous.state.died(learner, "killed")
    while (number := rendezvous.draw(last, asked[last])) is not None:
        done.add(number)
        asked[last] += 1
    assert done == set(range(total))
    assert generations == sorted(generations)


@pytest.mark.parametrize(
    "message", [{"kind": "draw", "request": 1}, {"kind": "register", "request": 1, "id": "x", "generation": "y"}]
)
def test_a_message_without_a_required_field_raises_and_changes_nothing(message):
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.now(learner, "budget", total=3, used=[])
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        rendezvous.state.handle(rendezvous.connections[0], message)
    assert rendezvous.state.living == [0, 1]
    assert rendezvous.draw(1, 0) == 0  # and what others ask is answered


def test_a_process_that_ends_before_it_registers_is_not_waited_for():
    rendezvous = Rendezvous(3)
    first = rendezvous.register(0)
    rendezvous.state.died(1, "killed by SIGKILL")
    assert not first.of("reply")
    rendezvous.register(2)
    (answer,) = first.of("reply")
    assert sorted(answer["living"]) == ["0", "2"]
    assert rendezvous.reported() == [("died", 1)]


def test_a_process_without_an_id_that_ends_before_it_registers_is_not_waited_for():
    rendezvous = Rendezvous(2)
    gone = {"kind": "process_died", "run": "first", "process": "host-7-0", "reason": "exit code 1"}
    rendezvous.state.handle(FakeConnection(), gone)
    assert rendezvous.register(0).of("reply")[0]["living"].keys() == {"0"}


def test_a_learner_that_registers_and_dies_before_the_others_come_is_not_waited_for():
    rendezvous = Rendezvous(3)
    rendezvous.register(0)
    rendezvous.state.died(0, "killed by SIGKILL")
    first = rendezvous.register(1)
    assert not first.of("reply")
    rendezvous.register(2)
    assert sorted(first.of("reply")[0]["living"]) == ["1", "2"]


def test_a_process_that_is_started_again_before_the_run_begins_is_waited_for():
    rendezvous = Rendezvous(2)
    rendezvous.state.died(1, "killed by SIGKILL")
    rendezvous.register(1)
    assert not rendezvous.connections[1].of("reply")
    rendezvous.register(0)
    assert sorted(rendezvous.connections[1].of("reply")[0]["living"]) == ["0", "1"]


def test_a_run_that_can_never_have_enough_learners_fails_at_once_and_says_why():
    rendezvous = Rendezvous(3, min_learners=3)
    waiting = rendezvous.register(0)
    rendezvous.state.died(1, "exit code 1: ZeroDivisionError")
    (answer,) = waiting.of("reply")
    assert answer["refused"] == (
        "only 2 of 3 learners can come, fewer than the 3 that the run needs; the first that ended: "
        "exit code 1: ZeroDivisionError"
    )
    assert rendezvous.register(2).of("reply")[0]["refused"] == answer["refused"]
    assert rendezvous.reported() == [("died", 1), ("stopping", None)]


def test_while_learners_are_missing_it_says_at_once_and_every_five_seconds_which_have_come():
    rendezvous = Rendezvous(3)
    rendezvous.wait(20)
    assert rendezvous.events == []  # nothing is expected yet
    rendezvous.register(1)
    rendezvous.wait(BEAT_S, heartbeats_of=(1,))
    assert [event["reason"] for event in rendezvous.events] == ["1 of 3 learners have come (1); missing: 0, 2"]
    rendezvous.wait(10.0, heartbeats_of=(1,))
    assert len(rendezvous.events) == 3
    rendezvous.register(0)
    rendezvous.register(2)
    rendezvous.wait(20, heartbeats_of=(0, 1, 2))
    assert len(rendezvous.events) == 3


def other_run(rendezvous, learner, identity, **more):
    """The reply to a learner of another run."""
    return rendezvous.register(learner, run=rendezvous.run | {"identity": identity}, **more).of("reply")


def test_a_learner_of_another_run_is_refused_while_this_run_lives_and_changes_nothing():
    rendezvous = formed(2)
    (answer,) = other_run(rendezvous, 2, "second")
    assert answer["refused"].startswith("this rendezvous serves the run 'first', not 'second'")
    (answer,) = other_run(rendezvous, 0, "second", generation=3, living={}, used=[], total=None)
    assert "refused" in answer
    assert rendezvous.state.living == [0, 1]
    assert rendezvous.events == []


@pytest.mark.parametrize("identity", ["first", "second"])
def test_a_rendezvous_serves_the_next_run_once_all_learners_of_the_last_have_left(identity):
    rendezvous = formed(2)
    for learner in (0, 1):
        rendezvous.state.handle(rendezvous.connections[learner], {"kind": "leave", "failure": ""})
    last = rendezvous.state.generation
    assert other_run(rendezvous, 0, identity) == []  # it waits for the other one
    (answer,) = other_run(rendezvous, 1, identity)
    assert answer["generation"] > last  # process groups of the two runs must not share keys
    assert not answer["joining"]


def finished(learners):
    """A rendezvous whose run has finished."""
    rendezvous = formed(learners)
    for learner in range(learners):
        rendezvous.state.handle(rendezvous.connections[learner], {"kind": "leave", "failure": ""})
    return rendezvous


def test_a_learner_that_is_started_again_after_its_run_has_finished_does_not_wait_for_ever():
    rendezvous = finished(2)
    for _ in range(2):  # an engine may start it again and again
        connection = rendezvous.register(1)
        rendezvous.wait(AFTER_FINISHED_S - 1, heartbeats_of=(1,))
        assert connection.of("reply") == []
        rendezvous.wait(3 * BEAT_S + 1, heartbeats_of=(1,))
        (answer,) = connection.of("reply")
        assert answer["refused"].startswith("the run has finished, and only 1 of 2 learners have come for another one")
        rendezvous.state.closed(connection)
        rendezvous.wait(2 * AWAY_S)


def test_after_a_finished_run_all_learners_may_begin_another_one_late_if_they_took_part_before():
    rendezvous = finished(2)
    first = rendezvous.register(0, again=True)
    rendezvous.wait(3 * AFTER_FINISHED_S, heartbeats_of=(0,))
    assert first.of("reply") == []
    (answer,) = rendezvous.register(1, again=True).of("reply")
    assert not answer["joining"]


def test_a_learner_that_comes_before_any_run_has_finished_waits_without_limit():
    rendezvous = Rendezvous(2)
    first = rendezvous.register(0)
    rendezvous.wait(3 * AFTER_FINISHED_S, heartbeats_of=(0,))
    assert first.of("reply") == []


def test_a_run_that_has_ended_cannot_be_joined():
    rendezvous = formed(1)
    rendezvous.state.handle(rendezvous.connections[0], {"kind": "leave", "failure": ""})
    (answer,) = other_run(rendezvous, 5, "first", joins=True)
    assert answer["refused"].startswith("the run has no learner left that this one could join")


def test_a_stop_reaches_all_learners_also_those_that_joined_and_no_other_can_join():
    rendezvous = formed(2)
    rendezvous.join(2)
    rendezvous.state.stop("Ctrl-C")
    for learner in (0, 1, 2):
        assert [message["reason"] for message in rendezvous.connections[learner].of("stop")] == ["Ctrl-C"]
    assert rendezvous.register(3, joins=True).of("reply")[0]["refused"] == "this run is being stopped (Ctrl-C)"


def test_if_one_learner_of_a_stop_group_stops_all_of_the_group_are_asked_to():
    rendezvous = formed(4, stop_groups=[0, 0, 1, 1])
    rendezvous.ask(0, "last_step", begun=7)
    assert [bool(rendezvous.connections[learner].of("stop")) for learner in range(4)] == [False, True, False, False]


def test_learners_that_joined_are_asked_to_stop_once_all_that_began_the_run_have_stopped():
    rendezvous = formed(2)
    rendezvous.join(2)
    rendezvous.now(0, "stop_boundary")
    assert not rendezvous.connections[2].of("stop")
    rendezvous.now(1, "stop_boundary")
    assert rendezvous.connections[2].of("stop")
    assert not rendezvous.connections[1].of("stop")
