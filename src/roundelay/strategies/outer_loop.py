"""The outer loop of LocalSGD: a round takes the outer step, sends y, mixes what comes, and brings the result into the module."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from roundelay.clock import Steps, done
from roundelay.strategies.outer_messages import OuterMessages
from roundelay.strategies.outer_rounds import OuterRounds
from roundelay.strategies.outer_weights import OuterWeights
from roundelay.transport.base import Transport
from roundelay.weights.flat import NON_FINITE


class OuterLoop:
    """The rounds of one learner. A round is begun by this learner, or by a peer in a thread of the transport.

    Args:
        transport: to the peers.
        outer: phi, m and y.
        messages: encodes y and mixes what comes.
        row: W_ij of a round by learner, in the order of ranks, the own one included.
        knows: whether a learner is a member. One that has joined may speak before this learner is told of it.
        begins_for_peers: begin a round as soon as a peer has begun it.

    Attributes:
        lock: guards `outer`, `messages`, and the module's weights while they change.
        steps: local steps since the last round began.
        late: bring the result in when the next own round begins, not as soon as it is here.
        rounds: what this learner and its peers say to each other.
    """

    def __init__(
        self,
        transport: Transport,
        outer: OuterWeights,
        messages: OuterMessages,
        row: Callable[[int], Mapping[int, float]],
        knows: Callable[[int], bool],
        *,
        begins_for_peers: bool,
    ) -> None:
        self._transport, self._outer, self._messages = transport, outer, messages
        self._row_of, self._begins_for_peers = row, begins_for_peers
        self.lock = threading.RLock()
        self.steps, self._steps_before = 0, 0  # the second one: of the round before
        self.late = False
        self._under_way = self._waiting = False  # the second one: the training thread waits for the end of a round
        self._mixed: Future[None] = done()
        self._failure: BaseException | None = None  # raised in a thread of the transport
        self._row: Mapping[int, float] = {}
        self._left_out = 0
        self._exchanges: Counter[int] = Counter()
        with self.lock:  # a peer may ask before the attribute is set
            self.rounds = OuterRounds(transport, self._asked, knows)

    def begin(self, *, late: bool) -> None:
        """Take the outer step and send y, unless a round is under way."""
        with self.lock:
            if self._under_way:
                return
            self._under_way, self.late = True, late
            self._outer.step()
            self._steps_before, self.steps = self.steps, 0
            round = self.rounds.state.next_round
            self._row = self._row_of(round)
            message = self._messages.encode(self._outer.y, self._outer.phi)
            mixed = self._mixed = Future()
        ended = self.rounds.begin(round, self._row.keys() - {self._transport.rank}, message)
        ended.add_done_callback(lambda _: self._ended(mixed))

    def _asked(self) -> None:
        """A peer waits for this learner in the next round. In a thread of the transport.

        If the training thread waits for the end of the last round, it begins the next one itself. Otherwise a learner
        whose peers begin one round after the other would wait for all of them, and take no steps.
        """
        if self._begins_for_peers and not self._waiting:
            self.begin(late=False)

    def _ended(self, mixed: Future[None]) -> None:
        """All messages are here: mix. In a thread of the transport, or on the virtual clock."""
        try:
            with self.lock:
                self._mix()
                self._under_way = False
        except BaseException as error:  # a future swallows what its callbacks raise: the next step raises this
            self._failure = error
        finally:
            mixed.set_result(None)
        if self._failure is None and self.rounds.state.wanted:
            self._asked()

    def _mix(self) -> None:
        """Phi <- sum_j W_ij y_j."""
        outer, received = self._outer, self.rounds.state.received
        mixed = self._messages.mix(self._row, self._transport.rank, received, outer.y, outer.phi)
        outer.mixed()
        for peer in self._messages.refused:
            self._transport.refused.count(NON_FINITE, f"a message of learner {peer}")
        self._left_out += len(self._row) - 1 - len(mixed)
        self._exchanges.update(mixed)

    def bring_in(self) -> None:
        """Add the result of a round that has ended to the module's weights."""
        with self.lock:
            self._outer.shift(moved=self.steps > 0)

    def settle(self) -> Steps:
        """Wait for the round under way, and bring its result in. The caller then begins a round if `peers_wait`."""
        self._waiting = True
        try:
            yield self._mixed
        finally:
            self._waiting = False
        self.check()
        self.bring_in()

    @property
    def peers_wait(self) -> bool:
        """Whether a peer has begun the next round, and this learner should begin it now."""
        return self._begins_for_peers and self.rounds.state.wanted

    def drain(self) -> Steps:
        """Wait for the round under way, and for those that peers ask for meanwhile."""
        yield from self.settle()
        while self.peers_wait:
            self.begin(late=False)
            yield from self.settle()

    def check(self) -> None:
        """Raise what went wrong in a thread of the transport."""
        if self._failure is not None:
            raise self._failure

    def metrics(self) -> dict[str, float]:
        """Rounds, the local steps of the last one, bytes of a message, neighbours left out, and exchanges by peer."""
        counts: dict[str, float] = {
            "rounds": self.rounds.state.round + 1,
            "local_steps": self._steps_before,
            "message_bytes": self._messages.nbytes,
            "neighbours_left_out": self._left_out,
        }
        return counts | {f"exchanges_with_{peer}": count for peer, count in sorted(self._exchanges.items())}

    def state_dict(self) -> dict[str, Any]:
        """Once settled: the round, the local steps, phi, m, and what compression has left out."""
        with self.lock:
            counts = {"round": self.rounds.state.round, "steps": self.steps}
            return counts | self._outer.state_dict() | {"messages": self._messages.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there, with the weights that the module has now."""
        with self.lock:
            self.rounds.state.round, self.steps = int(state["round"]), int(state["steps"])
            self._outer.load_state_dict(state)
            self._messages.load_state_dict(state["messages"])
