"""The consensus of learners with BatchNorm has the statistics over the data of all learners."""

import numpy as np
import torch
from loopback import loopback, together
from torch import nn

from roundelay import DPSGD, Learner, ring
from roundelay.vision.resnet import fashion_resnet

LEARNERS, STEPS = 4, 3


def train_and_look(transport, rank):
    """Train on images whose brightness grows with the rank; return the learner's own state and the consensus."""
    torch.manual_seed(0)
    module = fashion_resnet(4).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    rng = torch.Generator().manual_seed(rank)
    with Learner(module, optimizer, DPSGD(ring(LEARNERS)), transport) as learner:
        for _ in range(STEPS):
            images = 3 * rank + torch.randn(8, 1, 28, 28, generator=rng, dtype=torch.float64)
            labels = torch.randint(10, (8,), generator=rng)
            nn.functional.cross_entropy(module(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = {name: value.numpy().copy() for name, value in module.state_dict().items()}
        with learner.consensus() as mean:
            return own, {name: value.numpy().copy() for name, value in mean.state_dict().items()}


def test_the_small_resnets_consensus_is_numpys_mean_of_weights_means_and_second_moments():
    with loopback(LEARNERS) as transports:
        results = together(LEARNERS, lambda rank: train_and_look(transports[rank], rank))
    owns, consensuses = zip(*results, strict=True)

    def mean(of):
        return np.mean([of(own) for own in owns], axis=0)

    spreads = []
    for name in owns[0]:
        if name.endswith("num_batches_tracked"):
            expected = np.array(STEPS)
        elif name.endswith("running_var"):
            first = name.replace("running_var", "running_mean")
            # E[x^2] of all data is the mean of var + mean^2. The variance of all data is E[x^2] less the square of the mean.
            expected = mean(lambda own, n=name, f=first: own[n] + own[f] ** 2) - mean(lambda own, f=first: own[f]) ** 2
            spreads.append(np.abs(expected - mean(lambda own, n=name: own[n])).max())
        else:
            expected = mean(lambda own, n=name: own[n])
        for consensus in consensuses:
            np.testing.assert_allclose(consensus[name], expected, rtol=1e-10, atol=1e-12, err_msg=name)
    assert max(spreads) > 0.01, "the learners' data are too alike: the mean of the variances would pass this test too"
