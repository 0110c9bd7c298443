"""Spectra against closed forms, and against brute force that shares no code with them."""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc

import networkx as nx
import numpy as np
import pytest
from scipy import linalg

from roundelay.errors import TopologyError
from roundelay.topology import (
    Mixing,
    base_graph,
    complete,
    exponential,
    from_graph,
    from_matrix,
    hypercube,
    large,
    mixing as mixing_module,
    named,
    odd_even_ring,
    one_peer_exponential,
    random_matching,
    random_ring,
    ring,
    spectral_gap,
    spectrum,
    star,
    torus,
)
from roundelay.topology.spectrum import stationary_variance

approx = pytest.approx


def without_mean(mixing: Mixing, round: int = 0) -> np.ndarray:
    return mixing.matrix(round) - 1 / mixing.size


def period_product(mixing: Mixing) -> np.ndarray:
    product = np.eye(mixing.size) - 1 / mixing.size
    for round in range(mixing.period):
        product = mixing.matrix(round) @ product
    return product


class TestFixed:
    @pytest.mark.parametrize("size", [4, 6, 16, 64, 128, 1000])
    def test_ring_gap_is_its_closed_form(self, size):
        assert spectral_gap(ring(size)) == approx(4 / 3 * math.sin(math.pi / size) ** 2)

    @pytest.mark.parametrize(("size", "gap"), [(16, 0.05075), (64, 0.00321), (128, 0.000803)])
    def test_ring_gaps_are_those_of_the_paper(self, size, gap):
        assert spectral_gap(ring(size)) == approx(gap, rel=2e-3)

    @pytest.mark.parametrize("size", [3, 5, 8, 33])
    def test_gap_and_smallest_eigenvalue_are_those_of_the_dense_matrix(self, topology, size):
        if topology in ("hypercube", "one-peer-exponential"):
            size = 8
        mixing = named(topology, size)
        if mixing.period != 1:
            return
        found = spectrum(mixing)
        eigenvalues = np.linalg.eigvalsh(mixing.matrix())
        assert found.kind == "fixed"
        assert found.gap == approx(1 - np.abs(np.linalg.eigvalsh(without_mean(mixing))).max(), abs=1e-12)
        assert found.lambda_min == approx(eigenvalues[0], abs=1e-12)

    def test_star_eigenvalues(self):
        found = spectrum(star(10))
        assert found.gap == approx(1 / 10)  # 1, then 1 - 1/n many times, then 0
        assert found.lambda_min == 0

    def test_hypercube_gap(self):
        assert spectral_gap(hypercube(64)) == approx(2 / 7)  # 1 - (1 + d - 2)/(1 + d), d = 6

    @pytest.mark.parametrize("builder", [ring, torus, exponential, star, complete])
    @pytest.mark.parametrize("size", [2, 3, 16, 21])
    def test_stationary_variance_solves_the_lyapunov_equation(self, builder, size):
        W = without_mean(builder(size))
        covariance = linalg.solve_discrete_lyapunov(W, np.eye(size) - 1 / size)
        assert spectrum(builder(size)).stationary_variance == approx(np.trace(covariance) / size)

    @pytest.mark.parametrize(("builder", "variance"), [(ring, 2.410), (random_ring, 1.318), (complete, 0.938)])
    def test_stationary_variance_of_16_learners(self, builder, variance):
        assert spectrum(builder(16)).stationary_variance == approx(variance, abs=6e-4)

    def test_stationary_variance_agrees_with_running_the_recursion(self):
        mixing, rng = ring(8), np.random.default_rng(0)
        X, squares = np.zeros((8, 400)), []
        for round in range(1200):
            X = mixing.apply(X) - rng.standard_normal(X.shape)
            X -= X.mean(axis=0)
            if round >= 200:
                squares.append((X**2).mean())
        assert np.mean(squares) == approx(spectrum(mixing).stationary_variance, rel=0.01)

    def test_a_matrix_that_only_swaps_never_averages(self):
        found = spectrum(from_matrix([[0.0, 1.0], [1.0, 0.0]]))
        assert (found.gap, found.lambda_min) == (approx(0), approx(-1))
        assert found.rounds_to_1_percent is None
        assert found.stationary_variance is None

    def test_one_learner_is_always_exact(self, topology):
        found = spectrum(named(topology, 1))
        assert (found.gap, found.exact_after, found.rounds_to_1_percent) == (1, 0, 0)
        assert found.stationary_variance == 0


class TestRandom:
    @pytest.mark.parametrize("size", [3, 4, 16, 128, 5000])
    def test_random_ring_gap_is_its_closed_form(self, size):
        found = spectrum(random_ring(size))
        assert found.kind == "expected"
        assert found.gap == approx(1 - math.sqrt((size - 3) / (3 * (size - 1))))

    @pytest.mark.parametrize(("size", "rho"), [(8, 6 / 14), (9, 0.5), (101, 0.5), (3000, 2998 / 5998)])
    def test_random_matching_gap_is_its_closed_form(self, size, rho):
        assert spectral_gap(random_matching(size)) == approx(1 - math.sqrt(rho))

    @pytest.mark.parametrize("builder", [random_ring, random_matching])
    @pytest.mark.parametrize("size", [3, 4, 5, 6])
    def test_the_closed_form_is_the_mean_over_all_permutations(self, builder, size):
        W = builder(size).base.matrix()
        orders = [np.array(p) for p in itertools.permutations(range(size))]

        def over_all_orders(A: np.ndarray) -> np.ndarray:
            return np.mean([A[p][:, p] for p in orders], axis=0)

        rho = np.linalg.eigvalsh(over_all_orders(W @ W) - 1 / size)[-1]
        assert spectral_gap(builder(size)) == approx(1 - math.sqrt(rho), abs=1e-7)
        noise = np.eye(size) - 1 / size
        covariance = noise
        for _ in range(40):  # S <- E[W S W] + I - J/n, settled to 2^-40
            covariance = over_all_orders(W @ covariance @ W) + noise
        assert spectrum(builder(size)).stationary_variance == approx(np.trace(covariance) / size)

    def test_the_smallest_eigenvalue_is_that_of_the_fixed_ring(self):
        assert spectrum(random_ring(16)).lambda_min == approx(-1 / 3)

    def test_rounds_to_1_percent_follow_from_rho(self):
        rho = 125 / 381
        rounds = spectrum(random_ring(128)).rounds_to_1_percent
        assert rho**rounds <= 0.01 < rho ** (rounds - 1)


class HiddenRing(Mixing):
    """A user's own random mixing: the randomised ring, without telling that it is one."""

    def __init__(self, size: int, lazy: float = 0.0) -> None:
        super().__init__("hidden-ring", size, period=None)
        self._ring, self._lazy = random_ring(size, seed=7), lazy

    def row(self, rank: int, round: int = 0) -> dict[int, float]:
        row = {peer: weight * (1 - self._lazy) for peer, weight in self._ring.row(rank, round).items()}
        return row | {rank: row[rank] + self._lazy}


class TestEstimated:
    def test_an_estimate_is_labelled_and_within_four_standard_errors_of_the_truth(self):
        estimate, truth = spectrum(HiddenRing(12)), spectrum(random_ring(12))
        assert estimate.kind == "estimated"
        assert abs(estimate.gap - truth.gap) < 4 * estimate.gap_error < 0.05
        error = abs(estimate.stationary_variance - truth.stationary_variance)
        assert error < 4 * estimate.stationary_variance_error < 0.1

    def test_what_would_take_too_long_to_settle_is_not_estimated(self):
        found = spectrum(HiddenRing(6, lazy=0.9999))
        assert found.stationary_variance is None
        assert found.gap == approx(0, abs=1e-3)

    def test_large_ones_are_refused(self):
        with pytest.raises(TopologyError, match="at most 1024 learners"):
            spectrum(HiddenRing(1025))

    def test_one_learner_needs_no_estimate(self):
        assert spectrum(HiddenRing(1)).gap == 1


class TestPeriodic:
    @pytest.mark.parametrize("size", [4, 6, 16, 64])
    def test_odd_even_ring_gap_of_even_sizes_is_its_closed_form(self, size):
        assert spectral_gap(odd_even_ring(size)) == approx(1 - math.cos(2 * math.pi / size), abs=1e-9)

    @pytest.mark.parametrize("size", [3, 5, 9, 12, 31])
    def test_the_rate_is_that_of_the_dense_product_over_a_period(self, size):
        mixing = odd_even_ring(size)
        radius = np.abs(np.linalg.eigvals(period_product(mixing))).max()
        assert spectrum(mixing).kind == "periodic"
        assert spectral_gap(mixing) == approx(1 - radius ** (1 / mixing.period))

    @pytest.mark.parametrize(
        "mixing", [odd_even_ring(7), odd_even_ring(8), base_graph(11), base_graph(23, 2)], ids=repr
    )
    def test_stationary_variance_is_the_mean_over_the_phases_of_the_settled_recursion(self, mixing):
        noise = np.eye(mixing.size) - 1 / mixing.size
        covariance, last_period = np.zeros_like(noise), []
        for round in range(200 * mixing.period):
            W = mixing.matrix(round)
            covariance = W @ covariance @ W + noise
            last_period = [*last_period, np.trace(covariance) / mixing.size][-mixing.period :]
        assert spectrum(mixing).stationary_variance == approx(np.mean(last_period))

    @pytest.mark.parametrize("mixing", [ring(9), odd_even_ring(7), odd_even_ring(8), base_graph(11), star(5)], ids=repr)
    def test_rounds_to_1_percent_are_those_of_the_squared_norm_of_the_product(self, mixing):
        product, rounds = np.eye(mixing.size) - 1 / mixing.size, 0
        while np.linalg.norm(product, 2) ** 2 > 0.01:
            product, rounds = mixing.matrix(rounds) @ product, rounds + 1
        assert spectrum(mixing).rounds_to_1_percent == rounds

    @pytest.mark.parametrize("mixing", [ring(9), odd_even_ring(7), base_graph(11), star(5), random_ring(8)], ids=repr)
    def test_the_stationary_variance_alone_is_that_of_the_spectrum(self, mixing):
        assert stationary_variance(mixing) == spectrum(mixing).stationary_variance

    def test_one_peer_exponential_is_exact_after_log_n_rounds(self):
        found = spectrum(one_peer_exponential(64))
        assert (found.exact_after, found.gap, found.rounds_to_1_percent) == (6, 1, 6)

    def test_the_smallest_eigenvalue_is_that_of_the_worst_round(self):
        mixing = base_graph(11)
        smallest = min(np.linalg.eigvalsh(mixing.matrix(round))[0] for round in range(mixing.period))
        assert spectrum(mixing).lambda_min == approx(smallest)


class TestLarge:
    """Above DENSE_LIMIT learners: the same answers by Lanczos, as small ones made large by lowering the limit show."""

    @pytest.fixture
    def nothing_is_dense(self, monkeypatch):
        monkeypatch.setattr(mixing_module, "DENSE_LIMIT", 0)

    @pytest.mark.parametrize(
        "mixing",
        [star(40), base_graph(44), base_graph(50, 3), from_graph(nx.gnp_random_graph(60, 0.2, seed=1))],
        ids=repr,
    )
    def test_lanczos_agrees_with_dense_eigenvalues(self, mixing, monkeypatch):
        dense = spectrum(mixing)
        monkeypatch.setattr(mixing_module, "DENSE_LIMIT", 0)
        found = spectrum(mixing)
        assert found.gap == approx(dense.gap)
        assert found.lambda_min == approx(dense.lambda_min, abs=1e-9)
        assert (found.exact_after, found.rounds_to_1_percent) == (dense.exact_after, dense.rounds_to_1_percent)
        assert abs(found.stationary_variance - dense.stationary_variance) <= 4 * found.stationary_variance_error + 1e-9

    def test_a_gap_hard_by_zero_is_found_by_inversion(self):
        size = 1500  # a path: lambda_k = (1 + 2 cos(pi k / n)) / 3
        found = spectrum(from_graph(nx.path_graph(size)))
        assert found.gap == approx(2 / 3 * (1 - math.cos(math.pi / size)), rel=1e-6)
        assert found.lambda_min == approx((1 + 2 * math.cos(math.pi * (size - 1) / size)) / 3)

    def test_what_has_neither_symmetry_nor_an_exact_mean_is_refused(self, nothing_is_dense):
        with pytest.raises(TopologyError, match=rf"odd-even-ring\(9\) .* at most {large.DENSE_LIMIT} learners"):
            spectrum(odd_even_ring(9))

    @pytest.mark.parametrize(
        ("builder", "gap"), [(ring, 4 / 3 * math.sin(math.pi / 1e5) ** 2), (torus, None), (exponential, None)]
    )
    def test_100_000_learners_come_within_2_seconds_and_1_gigabyte(self, builder, gap):
        start = time.perf_counter()
        found = spectrum(builder(100_000))
        taken_s = time.perf_counter() - start
        tracemalloc.start()
        spectrum(builder(100_000))
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken_s < 2
        assert peak_bytes < 2**30
        if gap is not None:
            assert found.gap == approx(gap, rel=1e-5)

    def test_the_base_graph_of_20_000_learners(self):
        found = spectrum(base_graph(20_000))
        assert (found.gap, found.exact_after) == (1, base_graph(20_000).period)
        assert found.stationary_variance_error < 0.01


def test_the_random_ring_wins_the_gap_back_at_the_same_bytes():
    fixed, randomised = ring(128), random_ring(128)
    assert (fixed.degrees() == 2).all()
    assert (randomised.degrees(5) == 2).all()
    assert spectral_gap(randomised) > 500 * spectral_gap(fixed)
