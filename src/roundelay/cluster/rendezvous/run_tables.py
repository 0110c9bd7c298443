"""What a rendezvous remembers about one run."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.cluster.rendezvous.budget import SharedBudget
from roundelay.cluster.rendezvous.changes import MembershipChanges
from roundelay.cluster.rendezvous.members import Members
from roundelay.cluster.rendezvous.requests import PendingRequests
from roundelay.cluster.rendezvous.run_stop import RunStop
from roundelay.transport.heartbeats import Heartbeats


@dataclass(frozen=True)
class RunTables:
    """The parts of the memory of one run; `RunState`, `Registration` and `Replies` share them.

    Attributes:
        members: the learners.
        requests: the requests that wait for a reply.
        changes: of the membership.
        budget: which samples were given out.
        stop: how the run is stopped.
        heartbeats: when each learner was heard last.
    """

    members: Members
    requests: PendingRequests
    changes: MembershipChanges
    budget: SharedBudget
    stop: RunStop
    heartbeats: Heartbeats
