"""One Gaussian per state, and the axes in which it works best."""

from statistics import NormalDist

import numpy as np
import pytest

from roundelay.speech.gaussians import Gaussians, Mixtures, Statistics
from roundelay.speech.projection import Projection, discriminant_axes, mean_and_covariance, principal_axes


def test_gaussians_have_the_moments_of_their_frames_and_the_density_of_the_standard_library():
    rng = np.random.default_rng(0)
    frames = rng.standard_normal((90, 3)).astype(np.float32) * [1, 2, 3]
    labels = np.repeat([0, 1, 0], 30).astype(np.int32)
    fitted = Gaussians.fit(Statistics.of([(frames[:40], labels[:40]), (frames[40:], labels[40:])], 3))
    assert fitted.mean_SD[1] == pytest.approx(frames[labels == 1].mean(axis=0))
    assert fitted.variance_SD[0] == pytest.approx(frames[labels == 0].var(axis=0))
    assert fitted.mean_SD[2] == pytest.approx(frames.mean(axis=0))  # a state without frames
    axes = [NormalDist(m, v**0.5) for m, v in zip(fitted.mean_SD[0], fitted.variance_SD[0], strict=True)]
    density = [sum(np.log(axis.pdf(x)) for axis, x in zip(axes, frame, strict=True)) for frame in frames.tolist()]
    assert fitted.log_likelihoods(frames)[:, 0] == pytest.approx(density, abs=1e-4)


def test_discriminant_axes_find_the_direction_of_difference_and_whiten_the_rest():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 4000).astype(np.int32)
    frames = rng.standard_normal((4000, 3)) * [1, 10, 3]
    frames[:, 0] += 4 * labels
    _, covariance = mean_and_covariance([frames])
    axes = discriminant_axes(covariance, Statistics.of([(frames, labels)], 2), 2)
    first = axes[:, 0] / np.linalg.norm(axes[:, 0])
    assert abs(first[0]) > 0.99
    within = [np.cov((frames @ axes)[labels == i], rowvar=False) for i in range(2)]
    assert np.mean(within, axis=0) == pytest.approx(np.eye(2), abs=0.1)


def test_principal_axes_point_where_the_variance_is():
    frames = np.random.default_rng(2).standard_normal((4000, 3)) * [1, 10, 3] + 7
    mean, covariance = mean_and_covariance([frames[:1000], frames[1000:]])
    assert mean == pytest.approx(frames.mean(axis=0))
    assert covariance == pytest.approx(np.cov(frames, rowvar=False, bias=True))
    axes = principal_axes(covariance, 2)
    assert np.abs(axes[[1, 2], [0, 1]]) == pytest.approx([1, 1], abs=0.01)


def test_features_that_never_vary_do_no_harm():
    frames, labels = np.ones((20, 3), np.float32), np.repeat([0, 1], 10).astype(np.int32)
    seen = Statistics.of([(frames, labels)], 2)
    _, covariance = mean_and_covariance([frames])
    assert np.isfinite(discriminant_axes(covariance, seen, 2)).all()
    assert np.isfinite(Gaussians.fit(seen).log_likelihoods(frames)).all()


def test_a_state_with_several_gaussians_finds_the_kinds_of_its_frames():
    rng = np.random.default_rng(3)
    kinds = rng.integers(0, 3, 3000)
    frames = (np.array([[-5, 0], [0, 5], [5, 0]])[kinds] + rng.standard_normal((3000, 2))).astype(np.float32)
    other = rng.standard_normal((500, 2)).astype(np.float32)
    labels = {"u": np.zeros(3000, np.int32), "v": np.ones(500, np.int32)}
    fitted = Mixtures.fit({"u": frames, "v": other}, labels, np.array([3, 1], dtype=np.int32))
    found = np.argsort(fitted.components.mean_SD[:3, 0])
    assert fitted.components.mean_SD[found] == pytest.approx(np.array([[-5, 0], [0, 5], [5, 0]]), abs=0.2)
    shares = np.bincount(kinds) / 3000
    assert np.exp(fitted.log_weight_C)[[*found, 3]] == pytest.approx([*shares, 1], abs=0.02)
    scores = fitted.log_likelihoods(frames)
    assert scores.shape == (3000, 2)
    component = fitted.components.log_likelihoods(frames)[:, :3] + fitted.log_weight_C[:3]
    assert scores[:, 0] == pytest.approx(component.max(axis=1))


def test_with_one_gaussian_for_each_state_a_mixture_is_a_gaussian():
    rng = np.random.default_rng(4)
    frames, labels = rng.standard_normal((60, 3)).astype(np.float32), rng.integers(0, 3, 60).astype(np.int32)
    mixtures = Mixtures.fit({"u": frames}, {"u": labels}, np.ones(4, dtype=np.int32))  # the fourth has no frames
    gaussians = Gaussians.fit(Statistics.of([(frames, labels)], 4))
    assert mixtures.log_likelihoods(frames) == pytest.approx(gaussians.log_likelihoods(frames))


def test_silence_that_never_varies_and_silence_that_never_comes_stay_finite():
    frames = np.concatenate([np.zeros((40, 2)), np.random.default_rng(5).standard_normal((40, 2))]).astype(np.float32)
    for silence in (0, 1):
        labels = np.repeat([silence, 2], 40).astype(np.int32)
        fitted = Mixtures.fit({"u": frames}, {"u": labels}, np.array([4, 4, 1], dtype=np.int32))
        assert np.isfinite(fitted.log_likelihoods(frames)).all()


def test_a_projection_whitens_the_states_also_with_their_neighbouring_frames():
    rng = np.random.default_rng(6)
    labels = {"u": np.repeat(rng.integers(0, 3, 600), 10).astype(np.int32)}
    frames = {"u": rng.standard_normal((6000, 4)) * [1, 10, 3, 2] + 8 * np.eye(4)[labels["u"]]}
    projection = Projection.principal(frames, labels, 3).discriminating(frames, labels, 3)
    projected = projection(frames["u"])
    assert projected.shape == (6000, 3)
    residual = projected - np.stack([projected[labels["u"] == i].mean(axis=0) for i in range(3)])[labels["u"]]
    assert np.cov(residual, rowvar=False) == pytest.approx(np.eye(3), abs=0.05)


def test_likelihoods_do_not_depend_on_how_many_frames_are_scored_at_once(monkeypatch):
    rng = np.random.default_rng(7)
    frames, labels = rng.standard_normal((50, 3)).astype(np.float32), rng.integers(0, 2, 50).astype(np.int32)
    mixtures = Mixtures.fit({"u": frames}, {"u": labels}, np.array([2, 1], dtype=np.int32))
    at_once = mixtures.log_likelihoods(frames)
    monkeypatch.setattr("roundelay.speech.gaussians._NUMBERS_AT_ONCE", 20)
    assert mixtures.log_likelihoods(frames) == pytest.approx(at_once, abs=1e-5)
