"""One Gaussian per state, and the axes in which it works best."""

from statistics import NormalDist

import numpy as np
import pytest

from roundelay.speech.gaussians import Gaussians, Statistics, discriminant_axes, principal_axes, scatter


def test_gaussians_have_the_moments_of_their_frames_and_the_density_of_the_standard_library():
    rng = np.random.default_rng(0)
    frames = rng.standard_normal((90, 3)).astype(np.float32) * [1, 2, 3]
    labels = np.repeat([0, 1, 0], 30).astype(np.int32)
    fitted = Gaussians.fit(Statistics.of([frames[:40], frames[40:]], [labels[:40], labels[40:]], 3))
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
    _, covariance = scatter([frames])
    axes = discriminant_axes(covariance, Statistics.of([frames], [labels], 2), 2)
    first = axes[:, 0] / np.linalg.norm(axes[:, 0])
    assert abs(first[0]) > 0.99
    within = [np.cov((frames @ axes)[labels == i], rowvar=False) for i in range(2)]
    assert np.mean(within, axis=0) == pytest.approx(np.eye(2), abs=0.1)


def test_principal_axes_point_where_the_variance_is():
    frames = np.random.default_rng(2).standard_normal((4000, 3)) * [1, 10, 3] + 7
    mean, covariance = scatter([frames[:1000], frames[1000:]])
    assert mean == pytest.approx(frames.mean(axis=0))
    assert covariance == pytest.approx(np.cov(frames, rowvar=False, bias=True))
    axes = principal_axes(covariance, 2)
    assert np.abs(axes[[1, 2], [0, 1]]) == pytest.approx([1, 1], abs=0.01)


def test_features_that_never_vary_do_no_harm():
    frames, labels = np.ones((20, 3), np.float32), np.repeat([0, 1], 10).astype(np.int32)
    seen = Statistics.of([frames], [labels], 2)
    _, covariance = scatter([frames])
    assert np.isfinite(discriminant_axes(covariance, seen, 2)).all()
    assert np.isfinite(Gaussians.fit(seen).log_likelihoods(frames)).all()
