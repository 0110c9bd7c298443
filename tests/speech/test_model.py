"""The acoustic model: its size, and what it sees of padding."""

import numpy as np
import pytest
import torch

from roundelay.speech.model import FRAMES_AT_ONCE, AcousticModel, Ensemble, ModelConfig, acoustic_model, log_posteriors

PAPERS = ModelConfig(layers=6, width=512, bottleneck=256)


def small(seed=0, stack=1):
    torch.manual_seed(seed)
    return AcousticModel(5, 7, ModelConfig(layers=2, width=6, bottleneck=4, stack=stack))


def lstm_weights(inputs, width):
    """Four gates, each with weights of input and state and two biases; two directions."""
    return 2 * 4 * width * (inputs + width + 2)


def test_the_papers_model_has_43_million_parameters_and_164_mebibytes():
    with torch.device("meta"):
        model = AcousticModel(260, 32_000, PAPERS)
    count = sum(weight.numel() for weight in model.parameters())
    lstms = lstm_weights(260, 512) + 5 * lstm_weights(1024, 512)
    assert count == lstms + (1024 + 1) * 256 + (256 + 1) * 32_000 == 43_154_944
    assert round(4 * count / 2**20, 1) == 164.6


@pytest.mark.parametrize(("stack", "length"), [(1, 9), (3, 9), (3, 10)])
def test_padding_is_not_seen_by_the_backward_lstm(stack, length):
    model, frames = small(stack=stack), torch.randn(length, 5)
    alone = model(frames[None])
    padded = torch.full((2, 15, 5), 1e3)
    padded[0, :length] = frames
    together = model(padded, torch.tensor([length, 15]))
    torch.testing.assert_close(together[0, :length], alone[0])
    assert not torch.allclose(model(padded)[0, :length], alone[0])  # without lengths it would be


def test_a_step_of_stacked_frames_gives_each_frame_its_own_logits():
    model, plain, frames = small(stack=3), small(), torch.randn(2, 12, 5)
    steps, _ = model.lstm(frames.reshape(2, 4, 15))
    expected = model.output(model.bottleneck(steps).reshape(2, 12, 4))
    torch.testing.assert_close(model(frames), expected)
    assert model(frames[:, :10]).shape == (2, 10, 7)
    inputs = lstm_weights(15, 6) - lstm_weights(
        5, 6
    )  # the only other difference is the bottleneck, three times as wide
    added = sum(w.numel() for w in model.parameters()) - sum(w.numel() for w in plain.parameters())
    assert added == inputs + 2 * 4 * (12 + 1)


def test_posteriors_are_the_mean_over_all_ways_to_divide_an_utterance_into_steps():
    model, frames = small(stack=3).eval(), np.random.default_rng(0).standard_normal((10, 5)).astype(np.float32)
    expected = torch.zeros(10, 7)
    for begin in range(
        3
    ):  # the first steps hold 3, 1 and 2 frames of the utterance; copies of the first frame fill them
        padded = torch.from_numpy(np.concatenate([frames[[0] * (-begin % 3)], frames]))
        expected += model(padded[None])[0, -begin % 3 :].log_softmax(-1).detach() / 3
    torch.testing.assert_close(
        torch.from_numpy(log_posteriors(model, {"a": frames})["a"]), expected.log_softmax(-1), atol=1e-5, rtol=0
    )


def test_an_ensemble_is_the_mean_of_the_log_probabilities_of_different_networks():
    torch.manual_seed(0)
    model, frames = acoustic_model(5, 7, ModelConfig(layers=1, width=6, bottleneck=4, members=3)), torch.randn(2, 8, 5)
    assert isinstance(model, Ensemble)
    each = torch.stack([member(frames).softmax(-1) for member in model.members])
    assert each.std(0).mean() > 0.005
    geometric = each.prod(0) ** (1 / 3)
    torch.testing.assert_close(model(frames).softmax(-1), geometric / geometric.sum(-1, keepdim=True))


def test_one_member_is_the_network_itself():
    model = acoustic_model(5, 7, ModelConfig(layers=1, width=6, bottleneck=4))
    assert isinstance(model, AcousticModel)
    assert list(model.members) == [model]


@pytest.mark.parametrize("stack", [1, 3])
def test_posteriors_of_an_utterance_do_not_depend_on_those_beside_it(stack):
    model, rng = small(stack=stack), np.random.default_rng(0)
    frames = {str(n): rng.standard_normal((n, 5)).astype(np.float16) for n in (3, 40, 1, 17)}
    together = log_posteriors(model, frames)
    assert list(together) == list(frames)
    for name, scores in together.items():
        np.testing.assert_allclose(scores, log_posteriors(model, {name: frames[name]})[name], atol=1e-5)
        np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1, rtol=1e-5)


def test_long_utterances_go_alone():
    model = small()
    long = {name: np.zeros((FRAMES_AT_ONCE // 2 + 1, 5), np.float32) for name in "ab"}
    assert {scores.shape for scores in log_posteriors(model, long).values()} == {(FRAMES_AT_ONCE // 2 + 1, 7)}


def test_posteriors_are_those_of_the_model_without_dropout():
    torch.manual_seed(0)
    model = AcousticModel(5, 7, ModelConfig(layers=2, width=6, bottleneck=4, dropout=0.5)).train()
    frames = {"a": np.ones((4, 5), np.float32)}
    assert np.array_equal(log_posteriors(model, frames)["a"], log_posteriors(model, frames)["a"])
    assert model.training


@pytest.mark.slow
def test_the_papers_model_learns_from_a_batch_of_windows():
    torch.manual_seed(0)
    model = AcousticModel(260, 32_000, PAPERS)
    frames, states = torch.randn(2, 21, 260), torch.randint(32_000, (2, 21))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(frames).flatten(0, 1), states.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - np.log(32_000)) < 0.1  # nothing known yet: uniform over the states
    assert losses[2] < losses[1] < losses[0]
