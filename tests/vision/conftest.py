"""A miniature ImageNet, with the kinds of damaged and other files that real ones have."""

import numpy as np
import pytest
from PIL import Image

CLASSES = ("n01", "n02", "n03")
COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))
PER_CLASS = {"train": 12, "val": 6}


def picture(label, number):
    """Noise around the class's colour; sizes and shapes differ."""
    rng = np.random.default_rng([label, number])
    height, width = rng.integers(40, 90, 2)
    pixels = np.array(COLOURS[label]) + rng.normal(0, 30, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("ROUNDELAY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "roundelay"


@pytest.fixture
def imagenet(tmp_path, cache):
    """Three classes in each split. In train four images are damaged and three files are no images; in val one is damaged."""
    root = tmp_path / "imagenet"
    for split, count in PER_CLASS.items():
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                picture(label, number).save(folder / f"{name}_{number:03}.JPEG", quality=95)
    train = root / "train"
    whole = (train / "n01" / "n01_000.JPEG").read_bytes()
    (train / "n01" / "n01_003.JPEG").write_bytes(whole[: len(whole) // 3])  # truncated
    (train / "n01" / "n01_004.JPEG").write_bytes(b"")  # its neighbour, so that 005 replaces both
    (train / "n03" / "n03_011.JPEG").write_bytes(b"this is no JPEG")  # the last file, which the first file replaces
    (train / "n02" / "n02_005.JPEG").write_bytes(whole[:20] + b"\xff" * 500)
    for other in ("n01/.DS_Store", "n02/README.txt", "n03/Thumbs.db"):
        (train / other).write_bytes(b"x")
    picture(1, 90).convert("L").save(train / "n02" / "n02_006.JPEG")  # ImageNet has grey and CMYK images too
    picture(1, 91).convert("CMYK").save(train / "n02" / "n02_007.JPEG")
    picture(1, 92).convert("P").save(train / "n02" / "n02_008.png")
    (root / "val" / "n02" / "n02_002.JPEG").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\x00" * 30)
    return root


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Every test of this folder runs with one thread."""
