"""Speaker transforms against known transforms, a numerical optimiser, and the likelihood itself."""

import numpy as np
import pytest
from scipy.optimize import minimize

from roundelay.speech.fmllr import RowStatistics, SpeakerModel, adaptive_training, identity, transformed
from roundelay.speech.gaussians import Gaussians, Mixtures

DIMENSIONS, COMPONENTS = 3, 5


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def gaussians(rng, components=COMPONENTS, dimensions=DIMENSIONS):
    return Gaussians(
        rng.normal(scale=3.0, size=(components, dimensions)), rng.uniform(0.2, 2.0, (components, dimensions))
    )


def drawn(rng, model, frames):
    """Frames of random components of the model."""
    which = rng.integers(0, len(model.mean_SD), frames).astype(np.int32)
    return model.mean_SD[which] + np.sqrt(model.variance_SD[which]) * rng.standard_normal((frames, DIMENSIONS)), which


def affine(rng):
    A = np.eye(DIMENSIONS) + 0.3 * rng.standard_normal((DIMENSIONS, DIMENSIONS))
    return np.concatenate([A, rng.standard_normal((DIMENSIONS, 1))], axis=1)


def before(frames, W):
    """The frames x with W (x, 1) = frames."""
    return np.linalg.solve(W[:, :-1], (frames - W[:, -1]).T).T


def log_likelihood(frames, components, model, W):
    """Σ_t log N(W ξ_t; μ, σ²) + log|det A|, summed term by term."""
    after = frames @ W[:, :-1].T + W[:, -1]
    mean, variance = model.mean_SD[components], model.variance_SD[components]
    density = -0.5 * ((after - mean) ** 2 / variance + np.log(2 * np.pi * variance)).sum()
    return density + len(frames) * np.log(abs(np.linalg.det(W[:, :-1])))


def test_a_known_transform_is_recovered(rng):
    model, W = gaussians(rng), affine(rng)
    frames, which = drawn(rng, model, 20_000)
    found = RowStatistics.of(before(frames, W), which, model).transform(sweeps=50)
    assert found == pytest.approx(W, abs=0.03)


def test_a_numerical_optimiser_finds_the_same(rng):
    model, W = gaussians(rng), affine(rng)
    frames, which = drawn(rng, model, 60)
    frames = before(frames, W)
    best = minimize(
        lambda w: -log_likelihood(frames, which, model, w.reshape(DIMENSIONS, -1)),
        identity(DIMENSIONS).ravel(),
        method="BFGS",
    )
    assert RowStatistics.of(frames, which, model).transform(sweeps=200) == pytest.approx(
        best.x.reshape(DIMENSIONS, -1), abs=1e-3
    )


def test_the_likelihood_never_falls_from_one_sweep_to_the_next(rng):
    model = gaussians(rng)
    frames, which = drawn(rng, model, 40)
    frames = before(frames, affine(rng))
    seen, W = RowStatistics.of(frames, which, model), identity(DIMENSIONS)
    values = [log_likelihood(frames, which, model, W)]
    for _ in range(10):
        W = seen.transform(W, sweeps=1)
        values.append(log_likelihood(frames, which, model, W))
    assert (np.diff(values) >= -1e-9 * abs(values[0])).all()
    assert values[-1] > values[0] + 1


def speaker_model(rng):
    """A model with two states of speech, which have several Gaussians, and one state of silence."""
    mixtures = Mixtures(gaussians(rng), np.log([0.5, 0.5, 1.0, 0.3, 0.7]), np.array([0, 2, 3], np.int32))
    labels = [np.array([0, 0, 1, 2, 2, 2], np.int32)]
    return SpeakerModel.of(mixtures, labels, np.array([True, False, True]))


def test_without_data_or_with_silence_only_the_transform_is_the_identity(rng):
    model = speaker_model(rng)
    assert model.transform([]) == pytest.approx(identity(DIMENSIONS), abs=1e-9)
    silence = rng.standard_normal((500, DIMENSIONS)), np.ones(500, np.int32)
    assert model.transform([silence]) == pytest.approx(identity(DIMENSIONS), abs=1e-9)


def test_the_expected_statistics_are_the_mean_of_many_drawn_frames(rng):
    model = gaussians(rng)
    share = np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    which = rng.choice(COMPONENTS, 200_000, p=share).astype(np.int32)
    frames = model.mean_SD[which] + np.sqrt(model.variance_SD[which]) * rng.standard_normal((len(which), DIMENSIONS))
    many = RowStatistics.of(frames, which, model).times(1 / len(which))
    expected = RowStatistics.expected(model, share)
    for of_drawn, of_model in ((many.G, expected.G), (many.k, expected.k)):
        assert of_drawn == pytest.approx(of_model, abs=0.05 * np.abs(of_model).max())
    assert expected.frames == pytest.approx(1.0)


def test_little_data_moves_the_transform_a_little_and_much_data_all_the_way(rng):
    model, W = speaker_model(rng), affine(rng)
    W[:, :-1] = np.eye(DIMENSIONS) + 0.2 * (W[:, :-1] - np.eye(DIMENSIONS))
    distance = []
    for frames_number in (20, 200, 20_000):
        states = rng.choice([0, 2], frames_number).astype(np.int32)
        component = model.mixtures.first_S[states] + (rng.random(frames_number) < np.where(states == 0, 0.5, 0.7))
        mean, variance = (getattr(model.mixtures.components, name)[component] for name in ("mean_SD", "variance_SD"))
        frames = before(mean + np.sqrt(variance) * rng.standard_normal(mean.shape), W)
        distance.append(np.linalg.norm(model.transform([(frames, states)]) - W))
    assert distance[0] > distance[1] > distance[2]
    assert distance[2] < 0.2


def test_adaptive_training_raises_the_likelihood_and_brings_speakers_together(rng):
    model = gaussians(rng)
    features, labels, speakers = {}, {}, {}
    for i in range(4):
        W = affine(rng)
        for j in range(3):
            frames, labels[f"{i}-{j}"] = drawn(rng, model, 400)
            features[f"{i}-{j}"], speakers[f"{i}-{j}"] = before(frames, W), f"speaker {i}"
    plain = Mixtures.fit(features, labels, np.ones(COMPONENTS, np.int32))
    adapted, transforms = adaptive_training(features, labels, speakers, plain, np.ones(COMPONENTS, bool))

    def likelihood(mixtures, transforms):
        return sum(
            log_likelihood(features[name], labels[name], mixtures.components, transforms[speakers[name]])
            for name in features
        )

    before_training = likelihood(plain, dict.fromkeys(transforms, identity(DIMENSIONS)))
    assert likelihood(adapted.mixtures, transforms) > before_training + 0.3 * 4800
    spread = [
        np.var([transformed(features[n], transforms[speakers[n]])[labels[n] == 0].mean(axis=0) for n in group], axis=0)
        for group in (["0-0", "1-0", "2-0", "3-0"],)
    ]
    unadapted = np.var([features[n][labels[n] == 0].mean(axis=0) for n in ("0-0", "1-0", "2-0", "3-0")], axis=0)
    assert np.sum(spread) < 0.2 * np.sum(unadapted)
