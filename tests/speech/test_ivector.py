"""i-vectors against EM's guarantee, probabilistic PCA and drawn speakers."""

import numpy as np
import pytest

from roundelay.speech.gaussians import Gaussians
from roundelay.speech.ivector import FRAME_WEIGHT, IvectorExtractor, SpeakerStatistics, Ubm


def drawn_speakers(rng, T, ubm, speakers, frames):
    """Speakers with w ~ N(0, I), and the statistics of `frames` frames of each component."""
    found, vectors = [], rng.standard_normal((speakers, T.shape[2]))
    for w in vectors:
        shift = T @ w
        noise = np.sqrt(ubm.gaussians.variance_SD * frames) * rng.standard_normal(shift.shape)
        found.append(SpeakerStatistics(np.full(len(shift), float(frames)), frames * shift + noise))
    return found, vectors


def ubm_of(rng, components, dimensions):
    mean, variance = rng.normal(scale=5, size=(components, dimensions)), rng.uniform(0.5, 2, (components, dimensions))
    return Ubm(Gaussians(mean, variance), np.log(np.full(components, 1 / components)))


def test_the_likelihood_rises_with_every_step_of_em():
    rng = np.random.default_rng(0)
    ubm = ubm_of(rng, 4, 6)
    speakers, _ = drawn_speakers(rng, rng.standard_normal((4, 6, 3)), ubm, 30, 20)
    extractor = IvectorExtractor(ubm, 0.1 * rng.standard_normal((4, 6, 3)))
    values = []
    for _ in range(15):
        extractor, value = extractor.improved(speakers)
        values.append(value)
    assert (np.diff(values) > -1e-6 * abs(values[-1])).all()
    assert values[-1] > values[0] + 10


def test_with_one_component_em_finds_the_closed_form_of_factor_analysis():
    """One component with variance σ² and n frames: the mean is N(0, T Tᵀ + σ²/n), whose best T is that of probabilistic PCA
    (Tipping and Bishop 1999): T = U (Λ − σ²/n)^½ from the eigenvalues Λ and vectors U of the covariance of the means."""
    rng = np.random.default_rng(1)
    dimensions, rank, frames, variance = 5, 2, 10, 0.5
    ubm = Ubm(Gaussians(np.zeros((1, dimensions)), np.full((1, dimensions), variance)), np.zeros(1))
    true = 2 * rng.standard_normal((1, dimensions, rank))
    speakers, _ = drawn_speakers(rng, true, ubm, 200, frames)
    means = np.stack([seen.sum_CD[0] / frames for seen in speakers])
    values, vectors = np.linalg.eigh(means.T @ means / len(means))
    closed = vectors[:, -rank:] * np.sqrt(values[-rank:] - variance / frames)
    extractor = IvectorExtractor(ubm, 0.1 * rng.standard_normal((1, dimensions, rank)))
    for _ in range(60):
        extractor, _ = extractor.improved(speakers)
    assert extractor.T[0] @ extractor.T[0].T == pytest.approx(closed @ closed.T, abs=1e-3)


def test_the_posterior_mean_is_the_ridge_regression_of_the_frames():
    rng = np.random.default_rng(2)
    ubm, T = ubm_of(rng, 1, 4), rng.standard_normal((1, 4, 2))
    frames = ubm.gaussians.mean_SD[0] + rng.standard_normal((50, 4))
    whitened = np.repeat(T[0] / np.sqrt(ubm.gaussians.variance_SD[0])[:, None], 1, axis=0)
    target = ((frames - ubm.gaussians.mean_SD[0]) / np.sqrt(ubm.gaussians.variance_SD[0])).sum(axis=0)
    weight = FRAME_WEIGHT * 50
    ridge = np.linalg.solve(np.eye(2) + weight * whitened.T @ whitened, FRAME_WEIGHT * whitened.T @ target)
    found = IvectorExtractor(ubm, T)([frames[:20], frames[20:]])
    assert found == pytest.approx(ridge * np.sqrt(2) / np.linalg.norm(ridge), abs=1e-5)


def test_an_extractor_tells_speakers_apart_that_it_has_not_seen():
    rng = np.random.default_rng(3)
    components, dimensions, rank = 3, 4, 2
    centre, T = rng.normal(scale=6, size=(components, dimensions)), 1.5 * rng.standard_normal((3, 4, rank))

    def utterance(w, frames=300):
        which = rng.integers(0, components, frames)
        return (centre + T @ w)[which] + rng.standard_normal((frames, dimensions))

    people = rng.standard_normal((40, rank))
    train = {f"{i}-{j}": utterance(w) for i, w in enumerate(people) for j in range(2)}
    ubm = Ubm.fit(train, dict.fromkeys(train, 300), components)
    seen = [ubm.statistics([train[f"{i}-0"], train[f"{i}-1"]]) for i in range(len(people))]
    extractor = IvectorExtractor.fit(ubm, seen, rank)
    new = rng.standard_normal((10, rank))
    first, second = ([extractor([utterance(w)]) for w in new] for _ in range(2))
    cosine = np.array(first) @ np.array(second).T / rank
    assert np.diag(cosine).mean() > 0.97
    assert (cosine.argmax(axis=1) == np.arange(10)).mean() >= 0.8


def test_an_ivector_has_mean_square_one_and_is_zero_without_frames():
    rng = np.random.default_rng(4)
    extractor = IvectorExtractor(ubm_of(rng, 2, 3), rng.standard_normal((2, 3, 5)))
    assert np.mean(extractor([rng.standard_normal((30, 3))]) ** 2) == pytest.approx(1.0)
    assert extractor([]).tolist() == [0.0] * 5
