"""The cost of a step against closed forms, and against the strategies themselves on the virtual clock."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

from roundelay.clock import VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.errors import ConfigError
from roundelay.planning import Cluster, cluster as cluster_module
from roundelay.planning.cost import LOCAL_STEPS, MAX_LEAD, StepCost
from roundelay.planning.models import MODELS, PAIR_WEIGHT, step_cost
from roundelay.simulation.learners import seconds_per_step, step_starts
from roundelay.simulation.network import ModelledNetwork
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, LocalSGD, SuperLearner, pair_exchange
from roundelay.strategies.registry import STRATEGIES, strategy_named
from roundelay.topology import (
    Mixing,
    complete,
    from_matrix,
    hypercube,
    named,
    one_peer_exponential,
    random_matching,
    random_ring,
    ring,
    star,
    torus,
)
from roundelay.weights.replica import Replica

EVEN = Cluster(learners=8, model_bytes=100e6, step_s=0.5, step_spread=0.0, latency_s=1e-3, bandwidth_Bps=1e9)


def cost(strategy: str, cluster: Cluster, topology: str = "complete", group_size: int = 1) -> StepCost:
    return step_cost(MODELS[strategy], named(topology, cluster.learners // group_size), cluster, group_size)


class TestClosedForms:
    def test_a_ring_allreduce_sends_each_byte_2_n_minus_1_over_n_times(self):
        for n in (2, 8, 100):
            alone = replace(EVEN, learners=n, latency_s=0.0)
            assert alone.allreduce_s == pytest.approx(2 * (n - 1) / n * 100e6 / 1e9)

    def test_an_allreduce_step_is_compute_and_the_part_of_communication_that_does_not_hide(self):
        slow = replace(EVEN, bandwidth_Bps=1e8)
        assert cost("allreduce", slow).step_s == pytest.approx(0.5 + slow.allreduce_s - 2 / 3 * 0.5)
        fast = replace(EVEN, latency_s=0.0)  # only the last bucket of 25 MB is visible
        assert cost("allreduce", fast).step_s == pytest.approx(0.5 + fast.allreduce_s / 4)

    def test_delay_by_one_takes_the_longer_of_computing_and_averaging(self):
        assert cost("delay-by-one", EVEN).step_s == pytest.approx(0.5)
        slow = replace(EVEN, bandwidth_Bps=1e8)
        assert cost("delay-by-one", slow).step_s == pytest.approx(slow.allreduce_s)

    @pytest.mark.parametrize(
        ("topology", "models"), [("ring", 2), ("random-matching", 1), ("star", 7), ("complete", 7)]
    )
    def test_dpsgd_takes_the_longer_of_computing_and_sending_to_all_neighbours(self, topology, models):
        slow = replace(EVEN, bandwidth_Bps=2e8)
        assert cost("dpsgd", slow, topology).step_s == pytest.approx(max(0.5, models * 0.5 + 1e-3))

    def test_an_exchange_of_adpsgd_lasts_whole_steps(self):
        for bandwidth_Bps, steps in ((1e9, 1), (4e8, 2), (2e8, 3), (1e8, 5)):
            found = cost("adpsgd", replace(EVEN, bandwidth_Bps=bandwidth_Bps), "random-ring")
            assert (found.step_s, found.exchanges_per_step) == pytest.approx((0.5, 1 / steps))

    def test_adpsgd_leads_by_at_most_max_lead_steps(self):
        found = cost("adpsgd", replace(EVEN, bandwidth_Bps=1e6), "random-ring")
        assert found.step_s == pytest.approx(2 * (100 + 1e-3) / MAX_LEAD)

    @pytest.mark.parametrize(("topology", "models"), [("complete", 7), ("random-matching", 1)])
    def test_a_round_of_local_sgd_is_its_steps_and_its_messages(self, topology, models):
        slow = replace(EVEN, bandwidth_Bps=1e7)
        messages_s = models * 10.0 + 3 * 1e-3
        expected = (LOCAL_STEPS * 0.5 + messages_s) / LOCAL_STEPS
        assert cost("local-sgd", slow, topology).step_s == pytest.approx(expected)

    @pytest.mark.parametrize("factor", [3.0, 10.0])
    def test_a_slow_learner_of_local_sgd_takes_fewer_steps_and_delays_no_other(self, factor):
        slow = cost("local-sgd", replace(EVEN, slowest_factor=factor), "random-matching").steps_per_s
        balanced = cost("local-sgd", EVEN, "random-matching").steps_per_s
        assert slow / balanced == pytest.approx((7 + 1 / factor) / 8, rel=0.01)

    @pytest.mark.parametrize("spread", [0.0, 0.1])
    @pytest.mark.parametrize("factor", [3.0, 10.0])
    def test_with_one_slow_learner_adpsgd_keeps_n_minus_1_plus_1_over_s(self, factor, spread):
        even = replace(EVEN, step_spread=spread)
        slow = cost("adpsgd", replace(even, slowest_factor=factor), "random-ring").steps_per_s
        balanced = cost("adpsgd", even, "random-ring").steps_per_s
        assert slow / balanced == pytest.approx((7 + 1 / factor) / 8)

    @pytest.mark.parametrize("factor", [3.0, 10.0])
    @pytest.mark.parametrize(
        ("strategy", "topology"), [("delay-by-one", "complete"), ("dpsgd", "ring"), ("dpsgd", "torus")]
    )
    def test_with_one_slow_learner_synchronous_learners_keep_1_over_s(self, strategy, topology, factor):
        # 256 learners: on the ring the slow learner's delay needs 128 rounds to arrive everywhere, which a long run has.
        even = replace(EVEN, learners=256, bandwidth_Bps=1e10, latency_s=0.0)
        slow = cost(strategy, replace(even, slowest_factor=factor), topology).steps_per_s
        assert slow / cost(strategy, even, topology).steps_per_s == pytest.approx(1 / factor)

    def test_a_slow_learner_holds_an_allreduce_back_as_far_as_computing_goes(self):
        slow = cost("allreduce", replace(EVEN, slowest_factor=10.0)).step_s
        assert slow - cost("allreduce", EVEN).step_s == pytest.approx(9 * 0.5)

    def test_learners_of_a_machine_share_its_link(self):
        # A ring over machines of 4: two models leave each machine in a round.
        slow = replace(EVEN, learners=16, group_size=4, latency_s=0.0, bandwidth_Bps=1e8, group_bandwidth_Bps=1e9)
        assert cost("dpsgd", slow, "ring").step_s == pytest.approx(2.0)

    def test_one_learner_needs_its_compute_time_only(self):
        for strategy in MODELS:
            found = cost(strategy, replace(EVEN, learners=1, slowest_factor=10.0, step_spread=0.3))
            assert (found.step_s, found.steps_per_s) == pytest.approx((0.5, 2.0))

    def test_no_strategy_is_faster_than_without_communication(self):
        for strategy, model in MODELS.items():
            for topology in ("ring", "random-ring", "star") if model.has_topology else ("complete",):
                found = cost(strategy, replace(EVEN, learners=16, step_spread=0.3), topology)
                assert found.steps_per_s <= 16 / 0.5 * (1 + 1e-9)


class TestVirtualClock:
    """The event-driven simulator runs the strategies themselves on the same network."""

    GROUPS = replace(EVEN, learners=16, group_size=4, group_bandwidth_Bps=2e9)

    # If links are the bottleneck, messages of a round queue behind those of another, which the recursion leaves out.
    @pytest.mark.parametrize(("bandwidth_Bps", "error"), [(1e9, 0.01), (1e8, 0.25)])
    @pytest.mark.parametrize(
        "mixing", [ring(8), random_ring(8), star(8), torus(8), random_matching(8), one_peer_exponential(8)], ids=repr
    )
    def test_dpsgd(self, mixing, bandwidth_Bps, error):
        slow = replace(EVEN, bandwidth_Bps=bandwidth_Bps)
        assert cost("dpsgd", slow, mixing.name).step_s == pytest.approx(
            self.simulated_s(slow, lambda: DPSGD(mixing)), rel=error
        )

    @pytest.mark.parametrize("cluster", [EVEN, GROUPS], ids=["alone", "groups"])
    @pytest.mark.parametrize("bandwidth_Bps", [1e9, 1e8])
    def test_delay_by_one(self, cluster, bandwidth_Bps):
        slow = replace(cluster, bandwidth_Bps=bandwidth_Bps)
        assert cost("delay-by-one", slow).step_s == pytest.approx(self.simulated_s(slow, DelayByOne))

    @pytest.mark.parametrize("cluster", [EVEN, GROUPS], ids=["alone", "groups"])
    def test_allreduce_if_nothing_hides(self, cluster, monkeypatch):
        monkeypatch.setattr(
            cluster_module, "BACKWARD_SHARE", 0.0
        )  # the clock reduces gradients after the backward pass
        assert cost("allreduce", cluster).step_s == pytest.approx(self.simulated_s(cluster, Allreduce))

    @pytest.mark.parametrize("between", ["delay-by-one", "dpsgd", "adpsgd"])
    @pytest.mark.parametrize("bandwidth_Bps", [1e9, 1e8])
    def test_super_learners(self, between, bandwidth_Bps, monkeypatch):
        monkeypatch.setattr(cluster_module, "BACKWARD_SHARE", 0.0)
        slow = replace(self.GROUPS, bandwidth_Bps=bandwidth_Bps)
        simulated = self.simulated_s(slow, lambda: SuperLearner(strategy_named(between, topology="ring"), group_size=4))
        assert cost(between, slow, "ring", group_size=4).step_s == pytest.approx(simulated, rel=0.01)

    @pytest.mark.parametrize("cluster", [EVEN, GROUPS], ids=["alone", "groups"])
    @pytest.mark.parametrize("bandwidth_Bps", [4e9, 4e8, 1e8])
    def test_adpsgd_exchanges_as_often_as_predicted_and_waits_no_longer(self, cluster, bandwidth_Bps):
        slow = replace(cluster, bandwidth_Bps=bandwidth_Bps)
        step_s, exchanges = self.asynchronous(slow, random_ring(cluster.learners))
        found = cost("adpsgd", slow, "random-ring")
        assert found.step_s == pytest.approx(step_s, rel=0.03)
        assert found.exchanges_per_step == pytest.approx(exchanges, rel=0.25)

    def test_adpsgd_over_very_slow_links_waits_at_most_as_predicted(self):
        # An exchange that a learner answers also counts against its lead, so it may wait half as long.
        slow = replace(EVEN, bandwidth_Bps=4e6)
        step_s, _ = self.asynchronous(slow, random_ring(8))
        assert (
            cost("adpsgd", slow, "random-ring").step_s / 2
            <= step_s * 1.05
            <= cost("adpsgd", slow, "random-ring").step_s * 1.1
        )

    @staticmethod
    def simulated_s(cluster: Cluster, strategy_of) -> float:
        return seconds_per_step(strategy_of, cluster.links, cluster.model_bytes, [cluster.step_s] * cluster.learners)

    @staticmethod
    def asynchronous(cluster: Cluster, mixing: Mixing) -> tuple[float, float]:
        """Mean step time and exchanges per step of 200 steps; step times differ by 1 %, so that learners are not in lockstep."""
        strategies = []

        def strategy_of() -> ADPSGD:
            strategies.append(ADPSGD(mixing))
            return strategies[-1]

        compute_s = cluster.step_s * np.linspace(0.99, 1.01, cluster.learners)
        network = ModelledNetwork(VirtualClock(), cluster.learners, cluster.links, cluster.model_bytes)
        starts = step_starts(network, strategy_of, compute_s.tolist(), 200)
        return float(np.mean([(times[-1] - times[100]) / 99 for times in starts])), float(
            np.mean([strategy.metrics()["exchanges_per_step"] for strategy in strategies])
        )


class TestModels:
    @pytest.mark.parametrize("name", MODELS)
    def test_a_model_says_what_the_strategy_says_of_itself(self, name):
        strategy = strategy_named(name)
        assert name in STRATEGIES
        assert MODELS[name].synchronous == strategy.synchronous
        assert MODELS[name].takes_groups == strategy.takes_groups
        assert MODELS[name].has_topology == ("topology" in inspect.signature(type(strategy).__init__).parameters)

    def test_the_lead_is_the_default_of_adpsgd(self):
        assert inspect.signature(ADPSGD).parameters["max_lead"].default == MAX_LEAD

    def test_the_local_steps_are_the_default_of_local_sgd(self):
        assert inspect.signature(LocalSGD).parameters["every"].default == LOCAL_STEPS == MODELS["local-sgd"].local_steps

    def test_replicas_of_local_sgd_drift_for_many_steps(self):
        """On the complete graph they are equal after a round: the mean of 1, 2, ..., H steps apart."""
        expected = 7 / 8 * (LOCAL_STEPS + 1) / 2
        assert MODELS["local-sgd"].variance(complete(8), 1 / LOCAL_STEPS) == pytest.approx(expected)

    def test_delay_by_one_spreads_like_the_complete_graph(self):
        assert MODELS["delay-by-one"].variance(complete(8), 1.0) == pytest.approx(7 / 8)

    def test_pairs_on_a_random_ring_have_a_closed_form(self):
        # 8 pairs between two steps, each with E[W^T W] = I - 2w(1-w) L / |E|, w = 1/3, on the complete graph: 1 - 8/63 each.
        expected = 7 / 8 / (1 - (1 - 8 / 63) ** 8)
        assert MODELS["adpsgd"].variance(random_ring(8), 1.0) == pytest.approx(expected)
        assert MODELS["adpsgd"].variance(complete(8), 1.0) == pytest.approx(expected)

    @pytest.mark.parametrize("mixing", [ring(7), torus(12), hypercube(8)], ids=repr)
    def test_pairs_on_a_symmetric_graph_need_no_dense_eigenvalues(self, mixing):
        dense = from_matrix(mixing.matrix())
        assert MODELS["adpsgd"].variance(mixing, 0.7) == pytest.approx(MODELS["adpsgd"].variance(dense, 0.7))

    def test_a_pair_moves_as_in_the_strategy(self):
        assert PAIR_WEIGHT == pair_exchange.WEIGHT


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"learners": 0}, "learners must be more than 0, got 0"),
        ({"model_bytes": 0}, "model_bytes must be more than 0"),
        ({"step_s": -1}, "step_s must be more than 0, got -1"),
        ({"bandwidth_Bps": float("nan")}, "bandwidth_Bps must be more than 0, got nan"),
        ({"group_bandwidth_Bps": 0}, "group_bandwidth_Bps must be more than 0"),
        ({"step_spread": -0.1}, "at least 0, got -0.1"),
        ({"slowest_factor": 0.5}, "slowest_factor must be at least 1"),
        ({"group_size": 5}, "group_size must divide the 8 learners, got 5"),
        ({"learners": 1025}, "at most 1024 learners, got 1025"),
    ],
)
def test_an_impossible_cluster_is_refused_with_the_reason(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        replace(EVEN, **change)


@pytest.mark.parametrize("topology", ["complete", "random-matching"])
@pytest.mark.parametrize("slow", [1.0, 5.0])
def test_local_sgd_on_the_virtual_clock_is_as_fast_as_predicted(topology, slow):
    """With real messages over links that take a third of a round."""
    nbytes = 40_000
    cluster = Cluster(4, nbytes, 0.1, step_spread=0.0, slowest_factor=slow, latency_s=1e-4, bandwidth_Bps=nbytes / 0.8)
    clock = VirtualClock()
    network = ModelledNetwork(clock, 4, cluster.links)
    taken, until = [0] * 4, 60.0

    def learner(rank):
        module = torch.nn.Linear(nbytes // 4, 1, bias=False)
        strategy, step_s = LocalSGD(topology), 0.1 * (slow if rank == 0 else 1.0)
        strategy.attach(Replica(module), network.transports[rank], Membership.of(4))
        while True:
            yield step_s
            yield from strategy.before_step()
            yield from strategy.after_step()
            taken[rank] += 1

    for rank in range(4):
        clock.spawn(learner(rank))
    clock.run(until=until)
    assert sum(taken) / until == pytest.approx(cost("local-sgd", cluster, topology).steps_per_s, rel=0.1)
