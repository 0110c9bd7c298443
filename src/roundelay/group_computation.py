"""Collectives of an elastic run: all living learners compute together, also if some are lost meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from roundelay import waiting
from roundelay.cluster.membership import View
from roundelay.elastic import ElasticGroup, Result
from roundelay.errors import LaunchError, MembershipChangedError, MissingLearnersError
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.transport.healing import RETRY_S

log = logging.getLogger("roundelay")


def together(
    group: ElasticGroup, compute: Callable[[tuple[int, ...]], Result], timeout_s: float | None = None
) -> Result:
    """The result of `compute`, a collective of the living learners of `group`, which it is given.

    If a learner is lost meanwhile, a strategy that re-forms alone computes again without it.

    Raises MembershipChangedError, on all learners, if they must meet; MissingLearnersError after `timeout_s`.
    """
    learner, begun = group.learner, waiting.now()
    assert learner is not None
    while True:
        view = group.gather(_cut_off(learner.transport, group.view), timeout_s)
        living = view.membership.living
        if cut_off := {other: peers for other, peers in view.values.items() if peers}:
            if timeout_s is not None and waiting.now() - begun >= timeout_s:
                raise MissingLearnersError(timeout_s, sorted(set().union(*cut_off.values())))
            _wait_for_links(group.id, learner.strategy, cut_off)
            continue
        if view.addresses != group.grouped:  # a learner that was lost and has come back has a new address
            group.grouped = view.addresses
            learner.transport.use_generation(view.membership.generation)
        result: list[Result] = []
        try:
            result.append(compute(living))
        except LaunchError:
            raise
        except (ConnectionError, MembershipChangedError, RuntimeError) as error:
            log.warning("learner %d computes again with all living learners: %s", group.id, error)
        after = _success_of_all(group, learner.transport, bool(result))
        if after.membership.living == living and all(after.values.values()):
            return result[0]
        group.grouped = {}  # a collective that failed may still be under way in the old group
        if not learner.strategy.reforms_alone:
            raise MembershipChangedError("a learner was lost while all computed together")


def _success_of_all(group: ElasticGroup, transport: Transport, succeeded: bool) -> View:  # noqa: FBT001
    """Whether each learner has its result.

    If the collective has failed here, because a connection to one peer broke, the others may wait in it for this learner for
    ever. Those that do not come here are told so. That breaks the connections to them, which heal by themselves.
    """
    while True:
        try:
            return group.gather(succeeded, None if succeeded else RETRY_S)
        except MissingLearnersError as error:
            for peer in error.learners:
                transport.give_up(peer, "a computation of all learners has failed here")


def _cut_off(transport: Transport, view: View) -> list[int]:
    """Living learners to which this one has no connection."""
    return [peer for peer in view.membership.living if peer in transport.lost]


def _wait_for_links(learner: int, strategy: Strategy, cut_off: Mapping[int, list[int]]) -> None:
    """Some learners cannot reach each other: in a collective they would fail, and all others would wait for them.

    Raises MembershipChangedError if the learners must meet.
    """
    if not strategy.reforms_alone:
        raise MembershipChangedError("a learner was lost before all could compute together")
    log.warning("learner %d waits until all can reach each other; cut off are %s", learner, cut_off)
    waiting.sleep(RETRY_S)
