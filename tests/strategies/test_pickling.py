"""A strategy that is not attached can be sent to another process, and copied."""

from __future__ import annotations

import copy
import pickle

import pytest
from worlds import train, weights, world

import roundelay
from roundelay import topology
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology.registry import TOPOLOGIES

STRATEGIES = {
    "allreduce": Allreduce,
    "dpsgd": DPSGD,
    "dpsgd-ring": lambda: DPSGD("ring"),
    "adpsgd": lambda: ADPSGD("random-ring", max_lead=3),
    "adpsgd-function": lambda: ADPSGD(roundelay.random_ring),
    "adpsgd-mixing": lambda: ADPSGD(roundelay.ring(4), wire="bfloat16"),
    "adpsgd-plugin": lambda: ADPSGD("roundelay.topology:ring"),
    "delay-by-one": DelayByOne,
    "delayed-gradients": lambda: DelayByOne("gradients"),
    "super-learner": lambda: SuperLearner(ADPSGD("ring"), 2),
}
WAYS = {"pickle": lambda strategy: pickle.loads(pickle.dumps(strategy)), "deepcopy": copy.deepcopy}


def trained(strategies):
    clock, network, learners = world(strategies)
    train(clock, network, learners, [12] * 4)
    return weights(learners)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_copy_trains_as_the_original(name, way):
    original = STRATEGIES[name]()
    copies = [WAYS[way](original) for _ in range(4)]
    assert (trained(copies) == trained([STRATEGIES[name]() for _ in range(4)])).all()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_by_name_can_be_sent(name):
    family = pickle.loads(pickle.dumps(topology.family(name, seed=3)))
    mixing = topology.family(name, seed=3)(8)
    assert family(8).row(2, 1) == mixing.row(2, 1)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_mixing_can_be_sent(name):
    mixing = topology.family(name, seed=3)(8)
    assert pickle.loads(pickle.dumps(mixing)).row(2, 1) == mixing.row(2, 1)
