"""What must hold in every fault schedule. Most of it is checked at every step and every exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.errors import LaunchError, PeerLostError, RendezvousLostError, StrategyError, described
from roundelay.simulation.fault_schedule import EPOCHS, STEPS
from roundelay.strategies.pair_exchange import WEIGHT

if TYPE_CHECKING:
    from roundelay.simulation.elastic_transport import ElasticTransport
    from roundelay.simulation.fault_world import FaultWorld, Participant

INVARIANTS = {
    "the sum is conserved": "at every exchange of adpsgd: what one end adds the other subtracts, or both take it back; only a "
    "fault, or the caller's leaving, between the last reply and its confirmation may leave one half. Weights change by nothing "
    "else but steps",
    "every sample is used": "at the end of a run no batch is unused; a batch is used twice at most once per lost learner, "
    "twice if it lives and is told late, or while the rendezvous is away; if steps wait for others, the last batch of a lost "
    "learner may be unused",
    "no learner trains alone unknowingly": "a learner that the rendezvous has dropped knows it after 8 s, if it is connected",
    "generations never fork": "the generations of a learner only grow; two learners in one generation have the same members",
    "lead <= max_lead": "at every step of adpsgd, if a neighbour is neither lost nor silent; not once weights were refused",
    "weights are finite": "at every step: NaN in one learner never reaches another one",
    "the consensus is exact": "all learners get the same mean, and it is the mean of their weights",
    "every wait ends": "after the last fault all living learners finish the run; no learner ends by an error",
}
REFUSED = {"corrupt", "nan"}  # exchanges are refused, and after some tries a learner goes on
ALONE_S = 8.0  # heartbeats are missing for 5 s, then a learner connects again and is told
EXACT = 1e-9


class Invariants:
    """Watches a world. A violation is a sentence that begins with the name of the invariant.

    Args:
        world: that is watched.

    Attributes:
        violations: found so far, at most one for each invariant.
    """

    def __init__(self, world: FaultWorld) -> None:
        self._world, self._in_pairs = world, world.schedule.in_pairs
        self._found: dict[str, str] = {}
        self._expected: dict[object, Tensor] = {}  # by transport: first weights, steps and exchanges
        self._participants: dict[int, Participant] = {}  # by learner: the newest process
        self._generation: dict[object, int] = {}  # by process: the newest generation
        self._members: dict[int, tuple[int, set[int]]] = {}  # by generation: the first learner in it, and its members
        self._dropped_since: dict[object, float] = {}  # by process
        self._exchanges: dict[object, Tensor] = {}  # under way: what one end has added
        self._used: Counter[int] = Counter()  # by batch: gradients that were applied
        self._stepped_with: set[int] = set()  # batches of all steps, void ones included
        self._lost = 0
        self._consensus: dict[Any, list[tuple[Tensor, Tensor, float]]] = {}
        world.network.on_applied = self._applied
        world.network.on_attached = self._attached

    @property
    def violations(self) -> list[str]:
        """Sentences."""
        return [f"{name}: {what}" for name, what in self._found.items()]

    def violated(self, name: str, what: str) -> None:
        """Note that an invariant does not hold; the first time counts."""
        assert name in INVARIANTS, name
        if name not in self._found:
            self._found[name] = f"{what} (at {self._world.clock.now():.2f} s)"
            self._world.note(-1, f"violated: {name}: {what}")

    # At every step ---------------------------------------------------------------------------------------------------------

    def watch(self, participant: Participant, module: nn.Module, optimizer: Optimizer) -> None:
        """Look at every step of this optimizer. Call this before the Learner is made."""
        self._participants[participant.id] = participant
        optimizer.register_step_post_hook(lambda *_: self._stepped(participant, module, optimizer))

    def _stepped(self, participant: Participant, module: Any, optimizer: Optimizer) -> None:  # noqa: ANN401
        assert participant.learner is not None
        self._world.note(participant.id, "step")
        self._stepped_with.add(participant.number)
        learner, gradient = participant.learner, module.weight.grad
        if gradient is not None:  # otherwise the step is void: its gradient was dropped
            self._used[participant.number] += 1
        expected = self._expected.get(learner.transport)
        if expected is not None and gradient is not None:
            expected -= optimizer.param_groups[0]["lr"] * gradient
        self._check_weights(participant)
        self._check_generation(participant)
        self._check_known(participant)
        self._check_lead(participant)

    def _check_weights(self, participant: Participant) -> None:
        if participant.name not in self._world.poisoned and not bool(
            torch.isfinite(weights_of(participant.learner)).all()
        ):
            self.violated("weights are finite", f"learner {participant.id} has non-finite weights")

    def _check_generation(self, participant: Participant) -> None:
        assert participant.learner is not None
        group = participant.learner.peers.group
        assert group is not None
        members = group.view.membership
        before = self._generation.get(participant, -1)
        self._generation[participant] = members.generation
        if members.generation < before:
            what = f"learner {participant.id} went from generation {before} back to {members.generation}"
            self.violated("generations never fork", what)
        first, known = self._members.setdefault(members.generation, (participant.id, set(members.living)))
        # A learner that joins adds itself to the view of the others, until it is told the next one.
        if not known ^ set(members.living) <= {first, participant.id}:
            what = (
                f"generation {members.generation} has the members {known} for learner {first}, and {members.living} for"
            )
            self.violated("generations never fork", f"{what} learner {participant.id}")

    def _check_known(self, participant: Participant) -> None:
        client, state, now = participant.client, self._world.rendezvous.state, self._world.clock.now()
        assert client is not None
        run = state._run._members
        member = run.living.get(participant.id) or run.joining.get(participant.id)
        taken = member is not None and member.process == participant.name
        if taken or not client.connected or client.dropped is not None or not self._world.rendezvous.process.alive:
            self._dropped_since.pop(participant, None)
        elif now - self._dropped_since.setdefault(participant, now) > ALONE_S:
            what = f"learner {participant.id} trains for {ALONE_S:g} s in a run that has dropped it"
            self.violated("no learner trains alone unknowingly", what)

    def _check_lead(self, participant: Participant) -> None:
        schedule, learner = self._world.schedule, participant.learner
        assert learner is not None
        begun = {fault.kind for fault in schedule.faults if fault.at_s <= self._world.clock.now()}
        if not self._in_pairs or begun & REFUSED:
            return
        lead = learner.strategy.metrics()["lead"]
        if lead > schedule.max_lead and _reachable(learner.strategy._partners):  # type: ignore[attr-defined]
            self.violated("lead <= max_lead", f"learner {participant.id} leads by {lead:g} of {schedule.max_lead}")

    # At every exchange -----------------------------------------------------------------------------------------------------

    def _attached(self, transport: ElasticTransport) -> None:
        if self._in_pairs:
            self._expected[transport] = _live_weights(transport).clone()

    def _applied(self, transport: ElasticTransport, exchange: Any, difference: Tensor, sign: float) -> None:  # noqa: ANN401
        if not self._in_pairs:
            return
        self._check_balance(transport, exchange, difference, sign)
        expected = self._expected.get(transport)
        if expected is None or not transport.process.alive:
            return
        expected += sign * WEIGHT * difference.view(torch.float64)[: len(expected)]
        self._compare(transport, expected)

    def _check_balance(self, transport: ElasticTransport, exchange: Any, difference: Tensor, sign: float) -> None:  # noqa: ANN401
        """The caller must subtract what the other end has added; only a fault may take back half of an exchange."""
        added = self._exchanges.get(exchange)
        if sign > 0:
            self._exchanges[exchange] = difference.clone()
        elif added is None:  # the other end has taken it back before, or the caller has subtracted it
            if self._world.schedule.harmless and not exchange._caller.closed:
                self.violated("the sum is conserved", f"learner {transport.rank} took back half of an exchange")
        else:
            del self._exchanges[exchange]
            if not torch.equal(added, difference):
                self.violated("the sum is conserved", f"learner {transport.rank} subtracted not what another one added")

    def _compare(self, transport: ElasticTransport, expected: Tensor) -> None:
        if self._world.poisoned or transport.closed or transport._begin is None:
            return
        off = float((_live_weights(transport) - expected).abs().max())
        if not off < EXACT:
            what = f"the weights of learner {transport.rank} are off by {off:.3g} after an exchange"
            self.violated("the sum is conserved", what)

    # The end ---------------------------------------------------------------------------------------------------------------

    def consensus(self, participant: Participant, own: Tensor, mean: Tensor) -> None:
        """A learner with these weights of its own is in its last consensus, and has got this mean."""
        assert participant.learner is not None
        learner, client = participant.learner, participant.client
        assert client is not None
        assert client.view is not None
        found = self._consensus.setdefault(client.view.membership, [])
        found.append((mean, own, learner.strategy.consensus_weight))

    def process_failed(self, participant: Participant) -> None:
        """A process was killed, or ended by an error."""
        self._lost += 1
        if participant.ended.cancelled():
            return
        error = participant.ended.exception()
        if isinstance(error, PeerLostError) and self._world.schedule.same_group(participant.id, error.peer):
            return  # a super-learner that has lost a member ends
        if isinstance(error, StrategyError) and self._world.schedule.group_size > 1:
            return  # a member of a lost super-learner cannot come back, and members need equally many batches
        if not isinstance(error, LaunchError | RendezvousLostError):
            assert error is not None
            self.violated("every wait ends", f"learner {participant.id} ended by an error: {described(error)}")

    def at_end(self) -> None:
        """Check what holds only when a run is over."""
        for name, what in wrong_means(self._consensus, self._world):
            self.violated(name, what)
        if self._world.schedule.mode == "safety":
            return
        for learner, participant in sorted(self._world.participants.items()):
            if participant.process.alive:
                self.violated(
                    "every wait ends",
                    f"learner {learner} has not finished the run; it waits in {participant.process.where()}",
                )
        finished = any(each.finished for each in self._world.participants.values())
        if finished and self._world.schedule.group_size == 1:  # otherwise batches are dealt out beforehand
            self._check_samples()

    def _check_samples(self) -> None:
        schedule = self._world.schedule
        unused = [number for number in range(schedule.learners * STEPS * EPOCHS) if number not in self._stepped_with]
        events = [event["event"] for event in self._world.events]
        lost = events.count("died") + events.count("dropped") + self._lost
        waits = schedule.build().synchronous or schedule.group_size > 1
        if unused and not (waits and len(unused) <= lost):
            self.violated("every sample is used", f"batches {unused} were never used")
        twice = sum(count - 1 for count in self._used.values() if count > 1)
        away = any(fault.kind in ("rendezvous", "stall", "reconnect", "partition") for fault in schedule.faults)
        if twice > lost + events.count("dropped") and not away:
            self.violated(
                "every sample is used", f"{twice} batches were used twice, but only {lost} learners were lost"
            )


def _reachable(partners: Any) -> set[int]:  # noqa: ANN401
    """The neighbours of a learner that are neither lost nor silent."""
    mixing, living = partners._mixing, partners._membership.living
    rounds = range(mixing.period or 0)
    neighbours = {living[each] for round in rounds for each in mixing.row(partners._position, round)}
    reachable: set[int] = (neighbours or {*living}) - partners.lost - partners._silent - {partners._rank}
    return reachable


def _live_weights(transport: ElasticTransport) -> Tensor:
    begin: Any = transport._begin
    return begin.__self__._live.flat.views[0].detach()  # type: ignore[no-any-return]


def weights_of(learner: Any) -> Tensor:  # noqa: ANN401
    """The weights of a learner in a fault world: the live ones if the strategy has such."""
    flat = learner.strategy.weights()
    return learner.module.weight.detach() if flat is None else flat.views[0].detach()  # type: ignore[no-any-return]


def wrong_means(
    consensus: dict[Any, list[tuple[Tensor, Tensor, float]]], world: FaultWorld
) -> Iterator[tuple[str, str]]:
    """What is wrong with the means that learners have got; NaN is no mean."""
    name = "the consensus is exact"
    for members, found in consensus.items() if not world.poisoned else ():
        means = [mean for mean, *_ in found]
        if any(not torch.equal(mean, means[0]) for mean in means):
            yield name, "two learners have got different means"
        if world.schedule.harmless and len(found) == members.size:
            exact = torch.stack([weight * own for _, own, weight in found]).sum(0) / sum(weight for *_, weight in found)
            if not torch.allclose(means[0], exact, rtol=0, atol=EXACT):
                yield name, "what learners have got is not the mean of their weights"
