"""SpecAugment masks what its settings say, with the distribution that theory gives."""

import torch

from roundelay.speech.augment import AugmentConfig, masked


def test_nothing_is_hidden_unless_asked_for():
    frames = torch.randn(4, 21, 120)
    assert masked(frames, 40, AugmentConfig(), torch.Generator()) is frames


def test_a_hidden_bin_is_hidden_with_its_derivatives_and_others_stay():
    frames = torch.ones(200, 21, 130)
    hidden = masked(frames, 40, AugmentConfig(bins=10), torch.Generator().manual_seed(0))[:, 0] == 0
    assert torch.equal(hidden[:, :40], hidden[:, 40:80])
    assert torch.equal(hidden[:, :40], hidden[:, 80:120])
    assert not hidden[:, 120:].any()  # i-vectors


def test_hidden_bins_are_one_band_of_uniform_width():
    most, count = 8, 4000
    frames = torch.ones(count, 2, 40)
    hidden = masked(frames, 40, AugmentConfig(bins=most), torch.Generator().manual_seed(0))[:, 0] == 0
    borders = hidden.int().diff(dim=1, prepend=torch.zeros(count, 1, dtype=torch.int))
    assert (borders == 1).sum(1).max() == 1
    widths = torch.bincount(hidden.sum(1), minlength=most + 1)
    expected = count / (most + 1)
    assert len(widths) == most + 1
    assert ((widths - expected) ** 2 / expected).sum() < 26.1  # chi-squared with 8 degrees of freedom at 0.1 %


def test_hidden_frames_are_hidden_whole():
    hidden = masked(torch.ones(50, 21, 6), 2, AugmentConfig(frames=5), torch.Generator().manual_seed(1)) == 0
    assert torch.equal(hidden.any(2), hidden.all(2))
    assert hidden.all(2).sum(1).max() == 5


def test_what_is_hidden_depends_on_the_generator_alone():
    frames, config = torch.randn(8, 21, 120), AugmentConfig(bins=10, frames=5)
    once, again, other = (masked(frames, 40, config, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
