"""Learners whose weights are one known number, and a transport that offers their states."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import nn

from roundelay.errors import PeerLostError
from roundelay.training_state import TrainingState


class StateTransport:
    """Offers the states in `states` of its peers; a peer without one is lost."""

    def __init__(self, states=()):
        self.states = dict(states)

    def fetch(self, peer):
        future = Future()
        if peer in self.states:
            future.set_result(self.states[peer])
        else:
            future.set_exception(PeerLostError(peer, "its process ended"))
        return future

    def offer(self, state):
        self.offered = state


def training_state(value):
    """A module whose weights are all `value`, and what a learner that joins would receive."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, value)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2)).sum().backward()
    optimizer.step()  # momentum is there
    nn.init.constant_(module.weight, value)
    return module, TrainingState(module, optimizer)


def bytes_of(value):
    return training_state(value)[1].to_bytes()
