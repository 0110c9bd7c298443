import contextlib
import copy
import logging
import threading
import time

import numpy as np
import pytest
import torch
from exchanges import answering
from loopback import PATIENCE_S, loopback, outcomes, together
from torch import nn

from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, StrategyError
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology import complete, random_ring, ring
from roundelay.transport.solo import SoloTransport

STRATEGIES = {
    "allreduce": lambda size: Allreduce(),
    "dpsgd": lambda size: DPSGD(random_ring(size)),
    "adpsgd": lambda size: ADPSGD(random_ring(size)),
    "delay-by-one": lambda size: DelayByOne(),
    "delayed-gradients": lambda size: DelayByOne("gradients"),
}
LARGEST = 0.3  # after clipping
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def seeded(module, seed):
    """Weights from their own generator, because threads share torch's."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=rng))
    return module


def mlp(seed=0, **kwargs):
    module = nn.Sequential(nn.Linear(4, 8, **kwargs), nn.Tanh(), nn.Linear(8, 2, **kwargs))
    return seeded(module, seed)


def batch(rank, step, dtype=torch.float32):
    rng = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 4, generator=rng, dtype=dtype), torch.randn(6, 2, generator=rng, dtype=dtype)


def loss_of(module, rank, step, dtype=torch.float32):
    x, y = batch(rank, step, dtype)
    return nn.functional.mse_loss(module(x), y)


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().double().numpy()


def clip(module):
    with torch.no_grad():
        for weight in module.parameters():
            weight.clamp_(-LARGEST, LARGEST)


def solo(strategy=None, module=None, optimizer=None):
    module = module or mlp()
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    return Learner(module, optimizer, strategy or DPSGD(ring(1)), SoloTransport())


def steps_of(learner, count):
    """Takes `count` steps; yields the number of each when it is done."""
    for step in range(count):
        loss_of(learner.module, 0, step).backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        yield step


def train_together(size, strategy, steps=10, seeds=None, lr=0.1, hook=None):
    """Every learner's module after a plain loop."""
    with loopback(size) as transports:

        def work(rank):
            module = mlp(seed=rank if seeds is None else seeds[rank], dtype=torch.float64)
            optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
            if hook:
                optimizer.register_step_post_hook(lambda *_: hook(module))
            with Learner(module, optimizer, strategy(size), transports[rank]):
                for step in range(steps):
                    loss_of(module, rank, step, torch.float64).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return module

        return together(size, work)


# One learner ------------------------------------------------------------------------------------------------------------


@every_strategy
def test_a_world_of_one_is_plain_training(name):
    if name == "delayed-gradients":
        pytest.skip("its first step is zero by definition")
    plain, alone = mlp(), mlp()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, alone)]
    with Learner(alone, optimizers[1], STRATEGIES[name](1), SoloTransport()):
        for step in range(10):
            for module, optimizer in zip((plain, alone), optimizers, strict=True):
                loss_of(module, 0, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    np.testing.assert_allclose(flat(alone), flat(plain), rtol=1e-6, atol=1e-7)


def test_lbfgs_is_refused():
    module = mlp()
    with pytest.raises(StrategyError, match="LBFGS"):
        solo(module=module, optimizer=torch.optim.LBFGS(module.parameters()))


def test_an_optimizer_of_another_module_is_refused():
    with pytest.raises(StrategyError, match="none of the module's parameters"):
        solo(optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))


@every_strategy
def test_a_step_that_raises_can_be_followed_by_others(name):
    module = mlp()

    class Moody(torch.optim.SGD):
        angry = False

        @torch.no_grad()
        def step(self, closure=None):
            if self.angry:
                raise MemoryError("not today")
            return super().step(closure)

    optimizer = Moody(module.parameters(), lr=0.1)
    with solo(STRATEGIES[name](1), module, optimizer) as learner:
        for step in range(6):
            optimizer.angry = step == 3
            loss_of(module, 0, step).backward()
            if optimizer.angry:
                with pytest.raises(MemoryError):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert learner.steps == 5
    if name == "adpsgd":
        assert not learner.strategy._live.lock.locked()


@every_strategy
def test_steps_that_a_grad_scaler_skips_are_no_steps(name):
    module = mlp()
    before = flat(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with solo(STRATEGIES[name](1), module, optimizer) as learner:
        scaler.scale(loss_of(module, 0, 0) * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert learner.steps == 0
        assert scaler.get_scale() == 2.0
        for step in (1, 2):
            scaler.scale(loss_of(module, 0, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert learner.steps == 2
    assert np.isfinite(flat(module)).all()
    assert not np.array_equal(flat(module), before)


def test_a_learning_rate_schedule_goes_on_as_always():
    plain, alone = mlp(), mlp()
    results = []
    for module, hooked in ((plain, False), (alone, True)):
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        learner = Learner(module, optimizer, ADPSGD(ring(1)), SoloTransport()) if hooked else None
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        for step in range(6):
            loss_of(module, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if learner:
            learner.close()
        results.append((schedule.get_last_lr(), flat(module)))
    assert results[0][0] == results[1][0] == [pytest.approx(1e-3)]
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-6, atol=1e-7)


def test_metrics_tell_steps_seconds_and_what_the_strategy_knows():
    with solo(ADPSGD(ring(1))) as learner:
        for step in range(3):
            loss_of(learner.module, 0, step).backward()
            learner.optimizer.step()
        metrics = learner.metrics()
    assert metrics["steps"] == 3
    assert metrics["step_s"] == pytest.approx(metrics["compute_s"] + metrics["wait_s"] + metrics["mix_s"])
    assert {
        "bytes_sent",
        "bytes_received",
        "exchanges_per_step",
        "staleness_mean",
        "staleness_max",
        "lead",
        "spread",
    } <= set(metrics)


def test_seconds_per_step_are_of_the_steps_that_this_learner_has_taken_itself():
    with solo() as learner:
        for _ in steps_of(learner, 4):
            time.sleep(0.05)
        for load in (lambda: learner.count_from(1000), lambda: learner.load_state_dict(learner.state_dict())):
            load()
            assert learner.steps == 1000
            assert 0.05 < learner.metrics()["step_s"] < 0.15


def test_figures_of_the_user_stand_beside_the_learners_own():
    with solo() as learner:
        learner.observe(loss=3.0, accuracy=0.1)
        learner.observe(loss=2.0)
        metrics = learner.metrics()
    assert (metrics["loss"], metrics["accuracy"], metrics["steps"]) == (2.0, 0.1, 0)


@pytest.mark.parametrize("strategy_of", [Allreduce, lambda: DPSGD(ring(1)), lambda: ADPSGD(ring(1)), DelayByOne])
def test_a_compiled_module_trains_as_the_plain_one_does(strategy_of):
    """The eager backend: what matters here is dynamo's wrapper and its guards, not the generated code."""
    ends = []
    for wrap in (lambda module: module, lambda module: torch.compile(module, backend="eager")):
        module = wrap(mlp())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        with Learner(module, optimizer, strategy_of(), SoloTransport()):
            for step in range(5):
                loss_of(module, 0, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(flat(module))
    assert np.array_equal(*ends)


def test_the_state_survives_a_restart():
    first = solo(DPSGD(ring(1)))
    for step in range(3):
        loss_of(first.module, 0, step).backward()
        first.optimizer.step()
    state = copy.deepcopy(first.state_dict())
    first.close()
    second = solo(DPSGD(ring(1)), mlp(seed=5))
    second.module.load_state_dict(first.module.state_dict())
    second.load_state_dict(state)
    assert second.state_dict() == state == {"steps": 3, "strategy": {"round": 3}}
    loss_of(second.module, 0, 3).backward()
    second.optimizer.step()
    expected = (
        flat(first.module) - 0.1 * nn.utils.parameters_to_vector([p.grad for p in second.module.parameters()]).numpy()
    )
    np.testing.assert_allclose(flat(second.module), expected, rtol=1e-6, atol=1e-7)
    second.close()


@every_strategy
def test_what_an_earlier_hook_does_to_weights_is_part_of_the_step(name):
    if name == "delayed-gradients":
        pytest.skip("its first step is zero by definition")
    plain, alone = mlp(), mlp()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (plain, alone)]
    for module, optimizer in zip((plain, alone), optimizers, strict=True):
        optimizer.register_step_post_hook(lambda *_, module=module: clip(module))
    with Learner(alone, optimizers[1], STRATEGIES[name](1), SoloTransport()):
        for step in range(10):
            for module, optimizer in zip((plain, alone), optimizers, strict=True):
                loss_of(module, 0, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert np.abs(flat(alone)).max() == pytest.approx(LARGEST), "nothing was clipped, so nothing is shown"
    np.testing.assert_allclose(flat(alone), flat(plain), rtol=1e-6, atol=1e-7)


@every_strategy
def test_a_warning_is_logged_once_if_weights_changed_between_steps_are_lost(name, caplog):
    with solo(STRATEGIES[name](1)) as learner:
        for _ in steps_of(learner, 4):
            with torch.no_grad():
                learner.module[0].weight.mul_(0.5)
    told = [record for record in caplog.records if "weights were changed" in record.getMessage()]
    assert len(told) == (0 if name in ("allreduce", "delayed-gradients") else 1)


@every_strategy
def test_no_warning_is_logged_for_changes_by_the_learner_itself(name, caplog):
    with solo(STRATEGIES[name](1)) as learner:
        for step in steps_of(learner, 6):
            if step == 1:
                with learner.consensus():
                    pass
            if step == 2:
                with contextlib.suppress(ZeroDivisionError), learner.consensus():
                    raise ZeroDivisionError
            if step == 3:
                learner.state_dict()
            if step == 4:
                learner.load_state_dict(learner.state_dict())
    assert not [record for record in caplog.records if "weights were changed" in record.getMessage()]


@pytest.mark.parametrize("what_follows", ["consensus", "state_dict", "finish"])
def test_a_warning_is_logged_whatever_comes_next(what_follows, caplog):
    with solo(DPSGD(ring(1))) as learner:
        with torch.no_grad():
            learner.module[0].weight.mul_(0.5)
        if what_follows == "consensus":
            with learner.consensus():
                pass
        else:
            getattr(learner, what_follows)()
        assert "weights were changed" in caplog.text


def sparse_step(strategy):
    module = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with solo(strategy, module, optimizer) as learner:
        module(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        return learner.steps


def test_sparse_gradients_are_refused_by_strategies_that_reduce_gradients():
    assert sparse_step(DPSGD(ring(1))) == 1
    with pytest.raises(StrategyError, match="sparse gradients cannot be reduced"):
        sparse_step(Allreduce())


@every_strategy
def test_a_weight_outside_the_module_is_not_trained_without_an_error(name):
    module, head = mlp(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=0.1)
    with solo(STRATEGIES[name](1), module, optimizer):
        head(module(torch.ones(1, 4))).sum().backward()
        with pytest.raises(StrategyError, match=r"of shape \(2, 2\) that learners do not average"):
            optimizer.step()
        optimizer.zero_grad()


@every_strategy
def test_a_weight_that_is_unfrozen_later_is_not_trained_without_an_error(name):
    module = mlp()
    module[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with solo(STRATEGIES[name](1), module, optimizer) as learner:
        loss_of(module, 0, 0).backward()
        optimizer.step()
        module[0].weight.requires_grad_(True)
        loss_of(module, 0, 1).backward()
        with pytest.raises(StrategyError, match=r"of shape \(8, 4\) that learners do not average"):
            optimizer.step()
        assert learner.steps == 1
        optimizer.zero_grad()


class StepsHalfway(torch.optim.SGD):
    """Changes the first parameter, then raises."""

    @torch.no_grad()
    def step(self, closure=None):
        next(iter(self.param_groups[0]["params"])).add_(1.0)
        raise MemoryError("not today")


def half_a_step(module, optimizer):
    loss_of(module, 0, 0).backward()
    with pytest.raises(MemoryError):
        optimizer.step()


@pytest.mark.parametrize("name", ["dpsgd", "adpsgd"])
def test_training_continues_with_weights_loaded_after_a_step_that_raised(name):
    module = mlp()
    optimizer = StepsHalfway(module.parameters(), lr=0.1)
    with solo(STRATEGIES[name](1), module, optimizer) as learner:
        state = learner.state_dict()
        half_a_step(module, optimizer)
        better = mlp(seed=9)
        module.load_state_dict(better.state_dict())
        learner.load_state_dict(state)
        np.testing.assert_array_equal(flat(module), flat(better))
    np.testing.assert_array_equal(flat(module), flat(better))


@every_strategy
def test_after_a_step_that_raised_the_module_has_what_became_of_it_in_its_own_storage(name):
    module = mlp()
    optimizer = StepsHalfway(module.parameters(), lr=0.1)
    places, expected = [weight.data_ptr() for weight in module.parameters()], mlp()
    with torch.no_grad():
        next(expected.parameters()).add_(1.0)
    with solo(STRATEGIES[name](1), module, optimizer) as learner:
        half_a_step(module, optimizer)
        with learner.consensus():
            assert [weight.data_ptr() for weight in module.parameters()] == places
            np.testing.assert_array_equal(flat(module), flat(expected))
    np.testing.assert_array_equal(flat(module), flat(expected))


@every_strategy
def test_changes_between_saving_and_loading_the_state_are_kept(name):
    with solo(STRATEGIES[name](1)) as learner:
        assert list(steps_of(learner, 3)) == [0, 1, 2]
        state = learner.state_dict()
        with torch.no_grad():
            for weight in learner.module.parameters():
                weight.fill_(0.25)
        learner.load_state_dict(state)
        for group in learner.optimizer.param_groups:
            group["lr"] = 0.0
        loss_of(learner.module, 0, 3).backward()
        learner.optimizer.step()
        assert set(flat(learner.module)) == {0.25}


def test_after_close_the_optimizer_has_no_hooks():
    learner = solo(ADPSGD(ring(1)))
    learner.close()
    learner.close()
    loss_of(learner.module, 0, 0).backward()
    learner.optimizer.step()
    assert learner.steps == 0


def test_a_backward_that_raised_is_never_followed_by_solo_steps():
    module = mlp()
    with solo(Allreduce(), module) as learner:
        hook = module[0].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(module, 0, 0).backward()
        hook.remove()
        with pytest.raises(StrategyError, match="let that exception end the training loop"):
            loss_of(module, 0, 1).backward()
        learner._leave(RuntimeError("given up"))


def test_accumulated_gradients_are_reduced_once():
    module = mlp()
    calls = []
    strategy = Allreduce()
    with solo(strategy, module) as learner:
        transport = learner.transport
        inner = transport.all_reduce
        transport.all_reduce = lambda values, members: (calls.append(1), inner(values, members))[1]
        with learner.accumulate():
            for step in range(3):
                loss_of(module, 0, step).backward()
        assert calls == []
        loss_of(module, 0, 3).backward()
        assert len(calls) == len(strategy._buckets)
        transport.all_reduce = inner
    reference = mlp()
    for step in range(4):
        loss_of(reference, 0, step).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# Several learners -----------------------------------------------------------------------------------------------------


@every_strategy
def test_every_learner_starts_with_the_weights_and_buffers_of_learner_0(name):
    with loopback(3) as transports:

        def work(rank):
            module = seeded(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), seed=rank)
            module[0].bias.requires_grad_(False)
            module[1].running_mean.fill_(rank)
            module.register_buffer("flags", torch.tensor([rank == 0, True]))
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            with Learner(module, optimizer, STRATEGIES[name](3), transports[rank]):
                return {key: value.clone() for key, value in module.state_dict().items()}

        first, *others = together(3, work)
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)
    assert first["flags"].tolist() == [True, True]


def test_allreduce_is_training_on_all_batches_at_once():
    modules = train_together(3, lambda size: Allreduce())
    reference = mlp(seed=0, dtype=torch.float64)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        (sum(loss_of(reference, rank, step, torch.float64) for rank in range(3)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    for module in modules:
        np.testing.assert_allclose(flat(module), flat(reference), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("hook", "largest"), [(None, np.inf), (clip, LARGEST)])
@pytest.mark.parametrize("mixing", [ring, random_ring])
def test_dpsgd_over_sockets_equals_the_matrix_recursion(mixing, hook, largest):
    modules = train_together(4, lambda size: DPSGD(mixing(size)), hook=hook)
    models = [mlp(seed=0, dtype=torch.float64) for _ in range(4)]
    V = np.zeros((4, len(flat(models[0]))))
    for k in range(10):
        G = []
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, k, torch.float64).backward()
            G.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).numpy())
        V = 0.9 * V + np.stack(G)
        X = mixing(4).matrix(k) @ np.stack([flat(m) for m in models]) - 0.1 * V
        X = X.clip(-largest, largest)
        for row, model in zip(X, models, strict=True):
            nn.utils.vector_to_parameters(torch.tensor(row), model.parameters())
    np.testing.assert_allclose(np.stack([flat(m) for m in modules]), X, rtol=0, atol=1e-12)


class Assorted(nn.Module):
    """Weights of two dtypes, one used twice, one under two names, and one frozen."""

    def __init__(self):
        super().__init__()
        self.single, self.exact = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)
        self.again = nn.Linear(4, 4, dtype=torch.float64)
        self.again.weight = self.exact.weight
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.last = nn.Linear(4, 2, dtype=torch.float64)
        seeded(self, 3)

    def forward(self, x):
        hidden = torch.tanh(self.exact(torch.tanh(self.single(x) * self.frozen).double()))
        return self.last(torch.tanh(self.again(hidden)))


def assorted_gradients(module, rank, step):
    module.zero_grad()
    x, y = batch(rank, step)
    nn.functional.mse_loss(module(x), y.double()).backward()


@pytest.mark.parametrize("name", ["allreduce", "dpsgd", "delay-by-one", "super-learners"])
def test_dtypes_tied_and_frozen_weights_and_many_buckets_follow_the_recursion(name, monkeypatch):
    """x_i <- sum_j M_ij x_j - lr sum_j N_ij g_j, with M and N by hand."""
    monkeypatch.setattr("roundelay.strategies.allreduce.BUCKET_BYTES", 100)
    monkeypatch.setattr("roundelay.strategies.allreduce.FIRST_BUCKET_BYTES", 100)
    mean, alone, groups = np.full((4, 4), 0.25), np.eye(4), np.kron(np.eye(2), np.full((2, 2), 0.5))
    strategy, M, N = {
        "allreduce": (Allreduce, alone, mean),
        "dpsgd": (lambda: DPSGD(ring(4)), ring(4).matrix(0), alone),
        "delay-by-one": (DelayByOne, mean, alone),
        "super-learners": (lambda: SuperLearner(DelayByOne(), 2), mean, groups),
    }[name]
    with loopback(4) as transports:

        def work(rank):
            module = Assorted()
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            with Learner(module, optimizer, strategy(), transports[rank]):
                for step in range(8):
                    assorted_gradients(module, rank, step)
                    optimizer.step()
            return module

        modules = together(4, work)
    expected = [Assorted() for _ in range(4)]
    for step in range(8):
        for rank, module in enumerate(expected):
            assorted_gradients(module, rank, step)
        for weights in zip(*(module.parameters() for module in expected), strict=True):
            if weights[0].requires_grad:
                X, G = (
                    np.stack([each.double().numpy() for each in rows])
                    for rows in zip(*((w.detach(), w.grad) for w in weights), strict=True)
                )
                new = np.tensordot(M, X, 1) - 0.1 * np.tensordot(N, G, 1)
                for weight, row in zip(weights, new, strict=True):
                    weight.data.copy_(torch.tensor(row))
    for module, reference in zip(modules, expected, strict=True):
        assert module.again.weight is module.exact.weight
        assert module.single.weight.dtype == torch.float32
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("between", [lambda: DPSGD(ring(2)), lambda: ADPSGD(ring(2)), DelayByOne])
def test_members_of_a_group_are_bit_identical_between_steps(between):
    with loopback(4) as transports:

        def work(rank):
            module = mlp()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            seen = []
            with Learner(module, optimizer, SuperLearner(between(), 2), transports[rank]) as learner:
                for step in range(6):
                    loss_of(module, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(flat(module))
                    if step == 3:
                        with learner.consensus():
                            pass
                        seen.append(flat(module))
            return np.stack(seen)

        histories = together(4, work)
    assert np.array_equal(histories[0], histories[1])
    assert np.array_equal(histories[2], histories[3])
    assert not np.array_equal(histories[0], histories[2])


@pytest.mark.parametrize("between", [lambda: DPSGD(ring(2)), lambda: ADPSGD(ring(2)), DelayByOne])
def test_members_of_a_group_stay_bit_identical(between):
    X = np.stack([flat(module) for module in train_together(4, lambda size: SuperLearner(between(), 2))])
    assert np.array_equal(X[0], X[1])
    assert np.array_equal(X[2], X[3])
    if between().synchronous:  # an exchange after the last steps may make asynchronous groups equal, too
        assert not np.array_equal(X[0], X[2])


@every_strategy
def test_learners_with_unequal_numbers_of_batches_all_end(name):
    with loopback(3) as transports:

        def work(rank):
            module = mlp()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, STRATEGIES[name](3), transports[rank]) as learner:
                for step in range(2 + 3 * rank):
                    loss_of(module, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                learner.finish()
                with learner.consensus():
                    mean = flat(module)
            return learner.steps, mean

        steps, means = zip(*together(3, work), strict=True)
        assert steps == (2, 5, 8)
        for mean in means:
            np.testing.assert_allclose(mean, means[0], rtol=1e-6, atol=1e-7)


def test_clipping_sees_the_mean_gradient():
    with loopback(2) as transports:

        def work(rank):
            module = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            with Learner(module, optimizer, Allreduce(), transports[rank]):
                (module.weight.sum() * [10.0, -4.0][rank]).backward()
                return float(nn.utils.clip_grad_norm_(module.parameters(), 1e9))

        assert together(2, work) == [3.0, 3.0]


def test_a_grad_scaler_skips_the_step_everywhere_when_one_learner_overflows():
    with loopback(2) as transports:

        def work(rank):
            module = mlp()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            with Learner(module, optimizer, Allreduce(), transports[rank]) as learner:
                for step in range(3):
                    overflow = torch.inf if (rank, step) == (1, 1) else 1.0
                    scaler.scale(loss_of(module, rank, step) * overflow).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                return learner.steps, scaler.get_scale(), flat(module).tolist()

        first, second = together(2, work)
    assert first == second
    assert first[:2] == (2, 2.0)


def test_a_skipped_step_of_one_learner_is_a_round_that_others_wait_for():
    """Synchronous learners count steps: a learner that skips one ends one earlier, and still answers."""
    with loopback(2) as transports:

        def work(rank):
            module = mlp()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, DPSGD(ring(2)), transports[rank]) as learner:
                for step in range(5):
                    loss_of(module, rank, step).backward()
                    if (rank, step) != (1, 2):
                        optimizer.step()
                    optimizer.zero_grad()
            return learner.steps

        assert together(2, work) == [5, 4]


# Mistakes and deaths --------------------------------------------------------------------------------------------------


@every_strategy
def test_modules_that_differ_are_refused_by_all_learners(name):
    with loopback(3) as transports:

        def work(rank):
            module = nn.Linear(4, 3 if rank == 2 else 2)
            Learner(module, torch.optim.SGD(module.parameters(), lr=0.1), STRATEGIES[name](3), transports[rank])

        errors = outcomes(3, work)
    for error in errors:
        assert isinstance(error, StrategyError)
        assert "the module of learner 2 differs from learner 0's" in str(error)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: DPSGD(random_ring(4, seed=1)), lambda: DPSGD(random_ring(4, seed=2))),
        (lambda: DPSGD(ring(4)), lambda: ADPSGD(ring(4))),
        (DelayByOne, lambda: DelayByOne("gradients")),
        (lambda: SuperLearner(DPSGD(ring(4)), 1), lambda: SuperLearner(DPSGD(ring(1)), 4)),
    ],
)
def test_strategies_that_differ_are_refused_by_all_learners_instead_of_waiting_for_ever(ours, theirs):
    with loopback(4) as transports:

        def work(rank):
            module = mlp()
            strategy = theirs() if rank == 1 else ours()
            Learner(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy, transports[rank])

        errors = outcomes(4, work)
    for error in errors:
        assert isinstance(error, StrategyError)
        assert "the strategy of learner 1 differs from learner 0's" in str(error)


def test_a_mistake_of_one_learner_at_the_start_reaches_the_others():
    with loopback(2) as transports:

        def work(rank):
            module = mlp()
            kind = torch.optim.LBFGS if rank == 1 else torch.optim.SGD
            Learner(module, kind(module.parameters(), lr=0.1), ADPSGD(ring(2)), transports[rank])

        first, second = outcomes(2, work)
    assert isinstance(second, StrategyError)
    assert isinstance(first, PeerLostError)
    assert "LBFGS" in str(first)


@pytest.mark.parametrize("name", ["allreduce", "dpsgd", "delay-by-one", "delayed-gradients"])
def test_an_exception_in_the_loop_ends_synchronous_peers_which_hear_why(name):
    with loopback(3) as transports:

        def work(rank):
            module = mlp()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, STRATEGIES[name](3), transports[rank]):
                for step in range(1000):
                    if (rank, step) == (1, 4):
                        raise ZeroDivisionError("bad batch")
                    loss_of(module, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        errors = outcomes(3, work)
    assert isinstance(errors[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerLostError)
        assert "ZeroDivisionError: bad batch" in str(errors[rank])


def test_an_exception_in_the_loop_of_one_asynchronous_learner_is_survived_and_logged(caplog):
    died = threading.Event()
    with loopback(3) as transports, caplog.at_level(logging.WARNING, "roundelay"):

        def work(rank):
            module = mlp()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, ADPSGD(random_ring(3)), transports[rank]) as learner:
                for step in range(40):
                    if rank == 1 and step == 4:
                        died.set()
                        raise ZeroDivisionError("bad batch")
                    if step == 20:
                        assert died.wait(PATIENCE_S)
                    loss_of(module, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return learner.steps

        first, second, third = outcomes(3, work)
    assert first == third == 40
    assert isinstance(second, ZeroDivisionError)
    assert "has lost learner 1: it gave up (ZeroDivisionError: bad batch)" in caplog.text


def test_a_peer_that_is_lost_while_the_learner_is_being_made_is_not_called():
    class SlowToAttach(ADPSGD):
        def attach(self, replica, transport, membership):
            transport.lose(2, "its process ended")
            super().attach(replica, transport, membership)

    with loopback(3) as transports:
        module = mlp()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        strategy = SlowToAttach(complete(3))
        with Learner(module, optimizer, strategy, transports[0], Membership.of(3)) as learner:
            assert learner.membership.living == (0, 1)
            assert {strategy._partners.next() for _ in range(6)} == {1}
            learner.transport.check()


def test_peers_lost_in_two_threads_at_once_are_both_taken_out():
    learner = solo()
    learner.peers.membership = Membership.of(64)
    together(8, lambda rank: [learner.peers.peer_lost(peer, "test") for peer in range(8 * rank, 8 * rank + 8)])
    assert learner.membership.living == ()
    assert learner.membership.generation == 64
    learner.close()


def test_what_failed_in_the_background_is_raised_at_the_next_step():
    with loopback(2) as transports:

        def work(rank):
            module = mlp()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, ADPSGD(ring(2)), transports[rank]) as learner:
                if rank == 1:
                    learner.strategy._answer = None
                    learner.transport.serve(answering(lambda peer, request, reply: 1 / 0))
                for step in range(2000):
                    loss_of(module, rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return learner.steps

        first, second = outcomes(2, work)
    assert isinstance(second, ZeroDivisionError)
    assert first == 2000
