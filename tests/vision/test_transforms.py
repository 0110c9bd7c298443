import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from roundelay.vision import transforms
from roundelay.vision.transforms import (
    centre_box,
    for_evaluation,
    for_training,
    normalised,
    random_box,
    shifted_and_mirrored,
    shorter_side,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def boxes(width, height, count=4000):
    rng = generator()
    return np.array([random_box(width, height, rng) for _ in range(count)])


def numbered(width, height):
    """Red is the column, green the row (both below 256)."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8))


def test_random_boxes_lie_inside_and_have_areas_and_ratios_in_range():
    left, top, right, bottom = boxes(500, 375).T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 500 and bottom.max() <= 375  # noqa: PT018
    w, h = right - left, bottom - top
    rounding = 1.02  # of either side to whole pixels
    assert (w * h / (500 * 375)).min() >= 0.08 / rounding
    assert (w / h).min() >= 0.75 / rounding
    assert (w / h).max() <= 4 / 3 * rounding


def test_small_random_boxes_have_the_distribution_they_should():
    """If every box fits, none is rejected, so areas, logarithms of ratios, and places are uniform."""
    left, top, right, bottom = boxes(1200, 1200).T
    w, h = right - left, bottom - top
    share = w * h / 1200**2
    fits = share < 0.75  # sqrt(0.75 * 4/3) = 1: such a box always fits
    assert stats.kstest(share[fits], stats.uniform(0.08, 0.67).cdf).pvalue > 0.001
    log_ratio = np.log(w / h)[fits]
    assert stats.kstest(log_ratio, stats.uniform(math.log(0.75), 2 * math.log(4 / 3)).cdf).pvalue > 0.001
    place = ((left + 0.5) / (1200 - w + 1))[fits]
    assert stats.kstest(place, stats.uniform(0, 1).cdf).pvalue > 0.001


@pytest.mark.parametrize(
    ("width", "height", "expected"), [(1000, 10, (494, 0, 507, 10)), (10, 1000, (0, 494, 10, 507))]
)
def test_an_image_too_long_for_any_random_box_gives_the_largest_one_in_its_centre(width, height, expected):
    assert {random_box(width, height, generator(seed)) for seed in range(20)} >= {expected}


def test_a_single_pixel_is_cropped_to_itself():
    assert random_box(1, 1, generator()) == (0, 0, 1, 1)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (256, 256), (3000, 257)])
def test_the_shorter_side_is_scaled_and_the_ratio_kept(width, height):
    w, h = shorter_side(width, height, 256)
    assert min(w, h) == 256
    assert w / h == pytest.approx(width / height, abs=1 / 256)


def test_the_centre_is_exact():
    """224 of 256 pixels without any scaling: 16 are cut from each side."""
    pixels = for_evaluation(numbered(256, 256), 224)
    assert pixels.shape == (3, 224, 224)
    assert torch.equal(pixels[0], torch.arange(16, 240, dtype=torch.uint8).expand(224, 224))
    assert torch.equal(pixels[1], torch.arange(16, 240, dtype=torch.uint8).unsqueeze(1).expand(224, 224))
    assert centre_box(300, 256, 224, 224) == (38, 16, 262, 240)


def test_evaluation_scales_as_pillow_does_and_then_cuts_the_centre():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8))
    scaled = np.asarray(image.resize((341, 256), Image.Resampling.BILINEAR))
    assert np.array_equal(for_evaluation(image, 224).permute(1, 2, 0), scaled[16:240, 58:282])


def test_training_shows_the_box_scaled_and_mirrored_half_of_the_time(monkeypatch):
    monkeypatch.setattr(transforms, "random_box", lambda width, height, rng: (20, 30, 84, 94))
    straight = torch.arange(20, 84, dtype=torch.uint8)
    rng, mirrored = generator(), 0
    for _ in range(400):
        red, green, _ = for_training(numbered(200, 200), 64, rng)
        assert torch.equal(green, torch.arange(30, 94, dtype=torch.uint8).unsqueeze(1).expand(64, 64))
        assert torch.equal(red[0], straight) or torch.equal(red[0], straight.flip(0))
        mirrored += int(red[0, 0] > red[0, -1])
    assert stats.binomtest(mirrored, 400).pvalue > 0.001


def test_the_same_generator_gives_the_same_image():
    image = numbered(200, 150)
    first, second = generator(5), generator(5)
    one = [for_training(image, 32, first) for _ in range(3)]
    two = [for_training(image, 32, second) for _ in range(3)]
    assert all(map(torch.equal, one, two))
    assert not torch.equal(one[0], one[1])


def test_small_images_are_shifted_and_mirrored_as_a_loop_over_padded_crops_would():
    images = torch.randint(256, (300, 2, 9, 7), generator=generator(1), dtype=torch.uint8)
    seen = shifted_and_mirrored(images, 2, generator(2)).numpy()
    shifts, mirrored = set(), 0
    for before, after in zip(images.numpy(), seen, strict=True):
        padded = np.pad(before, ((0, 0), (2, 2), (2, 2)))
        matches = [
            (top, left, flip)
            for top in range(5)
            for left in range(5)
            for flip in (False, True)
            if np.array_equal(padded[:, top : top + 9, left : left + 7][:, :, :: -1 if flip else 1], after)
        ]
        assert len(matches) == 1
        shifts.add(matches[0][:2])
        mirrored += matches[0][2]
    assert shifts == {(top, left) for top in range(5) for left in range(5)}
    assert stats.binomtest(mirrored, 300).pvalue > 0.001


def test_normalising_is_the_formula():
    images = torch.randint(256, (2, 3, 4, 5), generator=generator(), dtype=torch.uint8)
    mean, std = np.array([0.1, 0.2, 0.3]), np.array([0.5, 0.25, 2.0])
    expected = (images.numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    result = normalised(images, mean.tolist(), std.tolist())
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-6)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert images.dtype == torch.uint8
