import numpy as np
import pytest
import torch
from loopback import loopback, together
from torch import nn

from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology import ring
from roundelay.transport.solo import SoloTransport

STRATEGIES = {
    "allreduce": Allreduce,
    "dpsgd": lambda: DPSGD(ring(4)),
    "adpsgd": lambda: ADPSGD(ring(4)),
    "delay-by-one": DelayByOne,
    "super-learner": lambda: SuperLearner(DPSGD(ring(2)), 2),
    "asynchronous-super-learner": lambda: SuperLearner(ADPSGD(ring(2)), 2),
}


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()


def each_learner(size, strategy, module_of, look, steps=5):
    """Train `size` learners a little on different data; what `look(learner, rank)` sees."""
    with loopback(size) as transports:

        def work(rank):
            module = module_of()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            rng = torch.Generator().manual_seed(rank)
            with Learner(module, optimizer, strategy(), transports[rank]) as learner:
                for _ in range(steps):
                    x = rank + torch.randn(8, 3, generator=rng, dtype=torch.float64)
                    module(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return look(learner, rank)

        return together(size, work)


def linear():
    module = nn.Linear(3, 2, dtype=torch.float64)
    nn.init.constant_(module.weight, 0.3)
    nn.init.constant_(module.bias, -0.2)
    return module


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_consensus_is_the_exact_mean_and_everything_is_put_back(name):
    def look(learner, rank):
        with learner.consensus() as mean:
            assert mean is learner.module
            inside = flat(mean)
        live = learner.strategy.weights()
        own = flat(learner.module) if live is None else live.parts[0].numpy().copy()
        return inside, own, learner.strategy.consensus_weight

    results = each_learner(4, STRATEGIES[name], linear, look)
    inside, after, weights_of_learners = (np.stack(column) for column in zip(*results, strict=True))
    mean = np.average(after, axis=0, weights=weights_of_learners)
    np.testing.assert_allclose(inside, np.tile(mean, (4, 1)), rtol=0, atol=1e-14)
    # Two groups agree exactly if their last exchange came after the last steps of both, as it may.
    may_agree = name in ("allreduce", "asynchronous-super-learner")
    assert may_agree or np.ptp(after, axis=0).max() > 1e-6, "learners differ, or this would prove nothing"


@pytest.mark.parametrize("name", ["dpsgd", "adpsgd"])
def test_a_consensus_block_changes_no_later_step(name):
    def look(learner, rank):
        before = flat(learner.module) if name == "dpsgd" else None
        with learner.consensus():
            nn.init.zeros_(learner.module.weight)
        if before is not None:
            assert np.array_equal(flat(learner.module), before)
        with learner.consensus() as mean:
            return flat(mean)

    first, *others = each_learner(4, STRATEGIES[name], linear, look)
    assert np.abs(first).max() > 0
    assert all(np.array_equal(first, other) for other in others)


def test_everything_is_put_back_also_when_the_block_raises():
    def look(learner, rank):
        before = {key: value.clone() for key, value in learner.module.state_dict().items()}
        with pytest.raises(ZeroDivisionError), learner.consensus():
            raise ZeroDivisionError
        after = learner.module.state_dict()
        return all(torch.equal(before[key], after[key]) for key in before)

    def normed():
        return nn.Sequential(linear(), nn.BatchNorm1d(2)).double()

    assert each_learner(4, STRATEGIES["dpsgd"], normed, look) == [True] * 4


def test_everything_is_put_back_also_when_a_peer_is_lost_on_the_way(monkeypatch):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.randn(8, 3)).sum().backward()
    with Learner(module, optimizer, DPSGD(ring(1)), SoloTransport()) as learner:
        before = {key: value.clone() for key, value in module.state_dict().items()}
        inner, calls = learner.transport.all_reduce, []

        def breaking(values, members):
            calls.append(values)
            if len(calls) > 3:  # barrier, weights_of_learners, weights: now the buffers
                raise ConnectionError("lost")
            return inner(values, members)

        monkeypatch.setattr(learner.transport, "all_reduce", breaking)
        with pytest.raises(ConnectionError), learner.consensus():
            pass
        monkeypatch.setattr(learner.transport, "all_reduce", inner)
        assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_batch_norm_is_that_of_all_data_together():
    """Learners have seen equally many samples of different kinds: mean and E[x^2] average, variances do not."""
    samples = [
        torch.randn(500, 3, generator=torch.Generator().manual_seed(r), dtype=torch.float64) + 5 * r for r in range(4)
    ]

    def normed():
        return nn.BatchNorm1d(3, momentum=None).double()

    with loopback(4) as transports:

        def work(rank):
            module = normed()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, DPSGD(ring(4)), transports[rank]) as learner:
                module(samples[rank])
                with learner.consensus():
                    return module.running_mean.clone(), module.running_var.clone(), int(module.num_batches_tracked)

        results = together(4, work)
    everything = torch.cat(samples)
    for mean, var, batches in results:
        torch.testing.assert_close(mean, everything.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(var, everything.var(0, unbiased=False), rtol=2e-3, atol=0)
        assert batches == 1


def test_floating_buffers_are_averaged_and_others_are_learner_0s():
    def module_with_buffers():
        module = linear()
        module.register_buffer("level", torch.zeros(2, dtype=torch.float32))
        module.register_buffer("count", torch.zeros(2, dtype=torch.int16))
        module.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
        return module

    def look(learner, rank):
        module = learner.module
        module.level.fill_(rank)
        module.count.fill_(10 + rank)
        module.flag.fill_(rank == 0)
        with learner.consensus():
            seen = (module.level.tolist(), module.count.tolist(), module.flag.tolist())
        assert module.count.tolist() == [10 + rank] * 2
        return seen

    assert each_learner(4, STRATEGIES["dpsgd"], module_with_buffers, look) == [([1.5, 1.5], [10, 10], [True, True])] * 4
