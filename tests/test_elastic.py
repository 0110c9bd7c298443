"""What one learner does when the membership changes. Client, endpoint, transport and strategy are stand-ins."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from learner_states import StateTransport, bytes_of, training_state

from roundelay.cluster.membership import Membership, View
from roundelay.elastic import ElasticGroup
from roundelay.errors import (
    DroppedError,
    LaunchError,
    MembershipChangedError,
    MissingLearnersError,
    PeerLostError,
    RendezvousLostError,
)
from roundelay.group_computation import together
from roundelay.meeting import Progress
from roundelay.transport.heartbeats import NO_HEARTBEAT


class Client:
    """Answers barriers with the views in `views`, one after the other, and records what it is told."""

    def __init__(self, learner, view, *views, joining=False):
        self.id, self.view, self.views, self.joining = learner, view, list(views), joining
        self.calls, self.barriers = [], []
        self.on_view = self.dropped = None
        self.begun = True

    def barrier(self, generation, value=None, lost=(), address=None, timeout_s=None):
        self.barriers.append((generation, value, list(lost), address))
        self.view = self.views.pop(0)
        return self.view

    def confirm_view(self):
        self.calls.append("confirm_view")

    def ready(self):
        self.calls.append("ready")

    def check(self):
        if self.dropped is not None:
            raise DroppedError(self.dropped)

    def rejoin(self, address, *, weights):
        self.calls.append(("rejoin", weights))
        self.dropped, self.joining, self.view = None, not weights, self.views.pop(0)
        return self.view


class Transport(StateTransport):
    """Also records what it is told."""

    def __init__(self, states=(), lost=None):
        super().__init__(states)
        self.lost, self.calls = lost or {}, []

    def keep_reaching(self, wanted, report):
        self.wanted, self.report = wanted, report

    def lose(self, peer, reason):
        self.calls.append(("lose", peer, reason))

    def admit(self, peer, address):
        self.calls.append(("admit", peer, address))

    def fail(self, error):
        self.calls.append(("fail", error))

    def close(self, failure=""):
        self.calls.append(("close", failure))


class Endpoint:
    def __init__(self, transport, cut_off=()):
        self.transport, self.cut_off = transport, cut_off

    def open(self):
        return "host", 7

    def connect(self, learner, view, *, joining):
        self.joined = joining
        return self.transport

    def reaches(self, learner, peer, address):
        return peer not in self.cut_off

    def close(self):
        pass


def strategy(*, reforms_alone, needs_equal_weights=False):
    return SimpleNamespace(
        reforms_alone=reforms_alone,
        needs_equal_weights=needs_equal_weights,
        at_rest=lambda: contextlib.nullcontext(None),
    )


def view_of(living, generation=0, values=None):
    return View(Membership(tuple(living), generation), {each: ("host", each) for each in living}, values or {})


def following(chosen, view=None, learner=0):
    """A group that follows a learner, with what the learner is told recorded."""
    client, transport = Client(learner, view or view_of([0, 1, 2])), Transport()
    group = ElasticGroup(client, Endpoint(transport), training_state(0.0)[1])
    reformed = []
    group.follow(SimpleNamespace(strategy=chosen, transport=transport, reform=reformed.append))
    return client, transport, reformed


def progress(*, ready=True, first=0, steps=0):
    return Progress(ready=ready, first_unconfirmed=first, weight_steps=steps).to_value()


def test_a_strategy_that_reforms_alone_follows_every_change():
    client, transport, reformed = following(strategy(reforms_alone=True))
    new = view_of([0, 2, 5], generation=1)
    client.on_view(new, "learner 1 died: killed")
    assert transport.calls == [("lose", 1, "learner 1 died: killed"), ("admit", 5, ("host", 5))]
    assert reformed == [new.membership]
    assert client.calls == ["confirm_view", "confirm_view"]  # the first view, and the new one


def test_other_strategies_are_interrupted_so_that_they_meet():
    client, transport, reformed = following(strategy(reforms_alone=False))
    client.on_view(view_of([0, 2], generation=1), "learner 1 died: killed")
    ((kind, error),) = transport.calls
    assert (kind, str(error)) == ("fail", "learner 1 died: killed")
    assert isinstance(error, MembershipChangedError)
    assert reformed == []


def test_a_learner_that_has_finished_and_left_interrupts_no_other():
    client, transport, _ = following(strategy(reforms_alone=False))
    client.on_view(view_of([0, 2], generation=1), "")
    assert transport.calls == []


def test_an_error_while_following_a_change_reaches_the_training_thread():
    client, transport, reformed = following(strategy(reforms_alone=True))
    transport.lose = None
    client.on_view(view_of([0, 2], generation=1), "learner 1 died")
    assert [(kind, type(error)) for kind, error in transport.calls] == [("fail", TypeError)]
    assert reformed == []


def test_a_change_that_came_while_the_learner_connected_is_applied_at_once():
    client, transport = Client(0, view_of([0, 1])), Transport()
    group = ElasticGroup(client, Endpoint(transport), training_state(0.0)[1])
    client.view = view_of([0], generation=1)
    group.follow(SimpleNamespace(strategy=strategy(reforms_alone=True), transport=transport, reform=lambda _: None))
    assert [(kind, peer) for kind, peer, _ in transport.calls] == [("lose", 1)]


def test_a_joining_learner_begins_with_the_mean_of_its_two_nearest_peers():
    module, state = training_state(0.0)
    transport = Transport({0: bytes_of(1.0), 1: bytes_of(9.0), 2: bytes_of(3.0)})
    endpoint = Endpoint(transport)
    group = ElasticGroup(Client(3, view_of([0, 1, 2, 3]), joining=True), endpoint, state)
    group.connect(strategy(reforms_alone=True), ready=False)
    assert endpoint.joined
    assert torch.equal(module.weight, torch.full((1, 2), 2.0))  # learners 0 and 2, on a ring


def test_a_joining_learner_that_gets_no_weights_fails_and_closes_its_transport():
    transport = Transport()
    group = ElasticGroup(Client(3, view_of([0, 1, 2, 3])), Endpoint(transport), training_state(0.0)[1])
    with pytest.raises(PeerLostError, match="its process ended"):
        group.connect(strategy(reforms_alone=True), ready=False)
    assert transport.calls[0][0] == "close"


@pytest.mark.parametrize(("needs_equal_weights", "expected"), [(True, 5.0), (False, 1.0)])
def test_after_a_meeting_a_learner_behind_keeps_its_weights_unless_all_must_be_equal(needs_equal_weights, expected):
    values = {0: progress(steps=9), 1: progress(steps=10)}
    module, state = training_state(1.0)
    client = Client(0, view_of([0, 1], 2, values), view_of([0, 1], 3))
    group = ElasticGroup(client, Endpoint(Transport({1: bytes_of(5.0)})), state)
    group.connect(strategy(reforms_alone=False, needs_equal_weights=needs_equal_weights), ready=True)
    assert torch.equal(module.weight, torch.full((1, 2), expected))
    assert group.view.membership.generation == 3


def test_learners_meet_again_if_one_is_lost_before_all_have_their_weights():
    client = Client(0, view_of([0, 1], 2, {0: progress(), 1: progress()}), view_of([0], 4))
    group = ElasticGroup(client, Endpoint(Transport()), training_state(0.0)[1])
    with pytest.raises(MembershipChangedError, match="lost before all could go on"):
        group.connect(strategy(reforms_alone=False), ready=True)


def test_a_meeting_goes_on_from_the_first_chunk_that_not_all_have_used():
    values = {0: progress(first=12, steps=10), 1: progress(first=8, steps=9), 2: progress(ready=False)}
    client = Client(0, view_of([0, 1, 2]), view_of([0, 1, 2], 1, values))
    group = ElasticGroup(client, Endpoint(Transport()), training_state(0.0)[1])
    mine = Progress(ready=True, first_unconfirmed=12, weight_steps=10)
    assert group.meet(mine) == Progress(ready=True, first_unconfirmed=8, weight_steps=10)
    assert client.barriers == [(0, progress(first=12, steps=10), [], ("host", 7))]


def test_a_meeting_is_told_which_peers_are_silent_but_not_which_have_closed_their_connection():
    client, transport = Client(0, view_of([0, 1, 2])), Transport()
    group = ElasticGroup(client, Endpoint(transport), training_state(0.0)[1])
    group.follow(SimpleNamespace(strategy=strategy(reforms_alone=False), transport=transport))
    transport.lost = {1: f"{NO_HEARTBEAT}, and more", 2: "its connection closed"}
    client.views = [view_of([0, 1], 1, {0: progress(), 1: progress()})]
    group.meet(Progress(ready=True, first_unconfirmed=0, weight_steps=0))
    assert client.barriers[0][2] == [1]


def test_a_super_learner_that_has_lost_a_member_leaves_and_the_others_meet_once_more():
    values = {each: progress() for each in (0, 1, 2)}
    for learner, error in ((2, LaunchError), (0, MembershipChangedError)):
        client = Client(learner, view_of([0, 1, 2, 3]), view_of([0, 1, 2], 1, values))
        group = ElasticGroup(client, Endpoint(Transport()), training_state(0.0)[1], group_size=2)
        with pytest.raises(error):
            group.meet(Progress(ready=True, first_unconfirmed=0, weight_steps=0))


def test_a_peer_that_is_reached_again_is_a_partner_again_and_the_trainer_hears_of_it():
    client, transport = Client(0, view_of([0, 1, 2])), Transport()
    group = ElasticGroup(client, Endpoint(transport), training_state(0.0)[1])
    heard, reformed = [], []
    group.on_link = lambda peer, reached: heard.append((peer, reached))
    group.follow(SimpleNamespace(strategy=strategy(reforms_alone=True), transport=transport, reform=reformed.append))
    assert set(transport.wanted()) == {0, 1, 2}
    transport.report(2, False)
    assert reformed == []
    transport.report(2, True)
    assert [membership.living for membership in reformed] == [(0, 1, 2)]
    assert heard == [(2, False), (2, True)]


def test_a_learner_that_joins_lets_the_others_train_until_it_can_reach_them(monkeypatch):
    client = Client(
        2, view_of([0, 1, 2]), view_of([0, 1, 2], 1, {0: progress(), 1: progress(), 2: progress()}), joining=True
    )
    endpoint = Endpoint(Transport(), cut_off=[1])
    group = ElasticGroup(client, endpoint, training_state(0.0)[1])

    def again(address, *, weights):
        assert client.barriers == []
        endpoint.cut_off = []
        return client.view

    client.rejoin, client.dropped = again, None
    monkeypatch.setattr("roundelay.elastic.RETRY_S", 0.0)
    group.meet(Progress(ready=False, first_unconfirmed=0, weight_steps=0))
    assert len(client.barriers) == 1


@pytest.mark.parametrize("reforms_alone", [False, True])
def test_a_learner_that_was_dropped_keeps_its_weights_if_no_other_learner_is_left(reforms_alone):
    alone, met = view_of([0], 5), view_of([0], 6, {0: progress(steps=9)})
    client = Client(0, view_of([0, 1]), alone, met, view_of([0], 7))
    module, state = training_state(1.0)
    group = ElasticGroup(client, Endpoint(Transport()), state)
    group.has_weights, client.dropped = True, "no heartbeat for 5 s"
    group.enter(strategy(reforms_alone=reforms_alone), ready=True, steps=9, agreement="")
    assert group.revived
    assert client.calls == [("rejoin", True)]
    assert client.barriers[0][1]["progress"]["ready"]
    assert torch.equal(module.weight, torch.full((1, 2), 1.0))


def test_a_learner_that_was_dropped_waits_for_a_rendezvous_that_is_away(monkeypatch):
    monkeypatch.setattr("roundelay.elastic.BEAT_S", 0.0)
    client = Client(2, view_of([0, 1, 2]), view_of([0, 1, 2], 3))
    errors = [RendezvousLostError("away"), DroppedError("it knows no more than that"), RendezvousLostError("away")]
    back = client.rejoin

    def rejoin(address, *, weights):
        if errors:
            raise errors.pop()
        return back(address, weights=weights)

    client.rejoin = rejoin
    group = ElasticGroup(client, Endpoint(Transport()), training_state(0.0)[1])
    group.rejoin()
    assert group.view.membership.generation == 3
    group.stopping, errors[:] = lambda: True, [RendezvousLostError("away")]
    with pytest.raises(RendezvousLostError):
        group.rejoin()


def test_a_learner_that_joins_asks_again_for_the_others_until_one_of_them_sends_its_weights(monkeypatch):
    monkeypatch.setattr("roundelay.elastic.RETRY_S", 0.0)
    client = Client(2, view_of([0, 1, 2]), view_of([0, 1, 2]), joining=True)
    endpoint, (module, state) = Endpoint(Transport()), training_state(0.0)
    group = ElasticGroup(client, endpoint, state)

    def again(address, *, weights):
        endpoint.transport = Transport({1: bytes_of(5.0)})
        return client.view

    client.rejoin = again
    group.enter(strategy(reforms_alone=True), ready=False, steps=0, agreement="")
    assert torch.equal(module.weight, torch.full((1, 2), 5.0))


def test_a_consensus_waits_for_a_cut_link_no_longer_than_its_budget(monkeypatch):
    monkeypatch.setattr("roundelay.group_computation.RETRY_S", 0.01)
    cut = view_of([0, 1], 2, {0: {"gathered": [1]}, 1: {"gathered": []}})
    client = Client(0, view_of([0, 1]), *[cut] * 100)
    group = ElasticGroup(client, Endpoint(Transport()), training_state(0.0)[1])
    group.learner = SimpleNamespace(transport=Transport(lost={1: "cut"}), strategy=strategy(reforms_alone=True))
    with pytest.raises(MissingLearnersError, match="missing: 1"):
        together(group, lambda living: None, timeout_s=0.05)
    assert 1 < len(client.barriers) < 20


def test_a_learner_that_joins_waits_until_the_others_have_begun():
    client = Client(2, view_of([0, 1, 2]), joining=True)
    client.begun = False
    group = ElasticGroup(client, Endpoint(Transport({1: bytes_of(5.0)})), training_state(0.0)[1])
    with pytest.raises(PeerLostError, match="not begun"):
        group.connect(strategy(reforms_alone=True), ready=False)


def test_a_learner_that_cannot_reach_the_others_leaves_when_it_is_asked_to():
    client = Client(2, view_of([0, 1, 2]), joining=True)
    group = ElasticGroup(client, Endpoint(Transport(), cut_off=[0, 1]), training_state(0.0)[1])
    group.stopping = lambda: True
    with pytest.raises(LaunchError, match=r"cannot reach learners \[0, 1\]"):
        group.meet(Progress(ready=False, first_unconfirmed=0, weight_steps=0))


def test_a_learner_that_has_joined_by_a_meeting_is_no_longer_joining():
    """Otherwise it would register again at the next meeting, when its peers have closed their ports."""
    values = {0: progress(steps=5), 1: progress(ready=False)}
    client = Client(1, view_of([0, 1]), view_of([0, 1], 2, values), joining=True)
    group = ElasticGroup(client, Endpoint(Transport()), training_state(0.0)[1])
    group.meet(Progress(ready=False, first_unconfirmed=0, weight_steps=0))
    assert not client.joining
