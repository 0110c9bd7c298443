"""State transfer: how a learner takes the weights and the optimizer's state of other learners of the run."""

from __future__ import annotations

from collections.abc import Mapping

from roundelay import waiting
from roundelay.cluster.membership import Membership
from roundelay.errors import LaunchError, PeerLostError
from roundelay.meeting import Progress, with_weights
from roundelay.training_state import TrainingState
from roundelay.transport.base import Transport

DONORS = 2  # a learner that joins an asynchronous run begins with the mean of this many others


def take_mean(learner: int, state: TrainingState, transport: Transport, membership: Membership) -> None:
    """Replace the state of `learner`, which joins while the others train, by the mean state of its nearest peers.

    If none of these replies, or all have weights that are not finite, ask the others one by one.

    Raises PeerLostError if no peer replies, LaunchError if no peer has finite weights.
    """
    others, lost = _nearest(learner, membership), PeerLostError(learner, "no other learner is left")
    replied = False
    for donors in (others[:DONORS], *([other] for other in others[DONORS:])):
        states = []
        for fetched in [transport.fetch(donor) for donor in donors]:
            try:
                states.append(waiting.result(fetched))
            except PeerLostError as error:
                lost = error
        replied = replied or bool(states)
        states = [each for each in states if state.finite(each)]
        if states:
            state.load_mean(states)
            return
    if not replied:
        raise lost
    raise LaunchError("no learner of the run could send finite weights to this one, which joins")


def take_newest(
    learner: int,
    state: TrainingState,
    transport: Transport,
    progress: Mapping[int, Progress],
    *,
    needs_equal_weights: bool,
) -> bool:
    """After a meeting, replace the state of `learner` by that of a peer with the most steps, unless it can keep its own.

    Also offers the state of `learner` to its peers. Returns whether the state was replaced.
    """
    candidates, own = with_weights(progress), progress[learner]
    most = max(each.weight_steps for each in candidates.values())
    source = min(candidate for candidate, each in candidates.items() if each.weight_steps == most)
    transport.offer(state.to_bytes)
    behind = needs_equal_weights and own.weight_steps < most
    if learner == source or (own.ready and not behind):
        return False
    state.load_mean([waiting.result(transport.fetch(source))])
    return True


def _nearest(learner: int, membership: Membership) -> list[int]:
    """The other living learners, those with the nearest positions first: on a ring these are the neighbours.

    >>> _nearest(4, Membership.of(5))
    [0, 3, 1, 2]
    """
    size, own = membership.size, membership.position(learner)
    offsets = (sign * distance for distance in range(1, size // 2 + 1) for sign in (1, -1))
    return list(dict.fromkeys(membership.living[(own + offset) % size] for offset in offsets))
