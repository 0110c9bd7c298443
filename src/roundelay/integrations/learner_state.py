"""The state of one learner, which integrations save beside the mean model, and from which that learner continues exactly."""

from __future__ import annotations

import logging
from typing import Any

import torch

from roundelay.learner import Learner
from roundelay.weights.serialization import snapshot

log = logging.getLogger("roundelay")


def learner_state(learner: Learner) -> dict[str, Any]:
    """A copy of the state of this learner, without frozen parameters: they are part of the mean model that is saved."""
    averaging = learner.state_dict()  # comes first, because it may change the module
    module = learner.module
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    trained = {name for name, value in module.named_parameters() if value.requires_grad}  # of tied parameters the first
    own = {name: value for name, value in module.state_dict().items() if name in trained or name not in parameters}
    state = {"learners": learner.transport.size, "learner": averaging, "module": own}
    return dict(snapshot(state | {"optimizer": learner.optimizer.state_dict()}))


def resume(learner: Learner, state: dict[str, Any], source: str) -> None:
    """Continue from `state` if every learner has one; else all of them begin with the weights that they have. A collective.

    Args:
        learner: has the mean model.
        state: what `learner_state` has returned; empty if there is none.
        source: where states are looked for, for the warning.
    """
    fits = state.get("learners") == learner.transport.size
    if not _all(learner, fits):
        rank = learner.transport.rank
        log.warning("learner %d begins with the mean model: not all learners have a state in %s", rank, source)
        return
    learner.module.load_state_dict(state["module"], strict=False)
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.load_state_dict(state["learner"])


def _all(learner: Learner, own: bool) -> bool:  # noqa: FBT001
    """Whether all living learners say yes."""
    if learner.elastic:
        return all(learner.gather(own).values())
    votes = torch.tensor([float(own)])
    learner.transport.all_reduce(votes, learner.members).result()
    return bool(votes.item() == len(learner.members))
