"""Hours of audio per hour of one core for features, training and decoding, and the memory of a flat start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from roundelay.errors import RoundelayError
from roundelay.speech.align import Transcripts
from roundelay.speech.feature_set import FeatureSet, write_features
from roundelay.speech.features import FeatureConfig, SpeakerFeatures, log_mel, with_deltas
from roundelay.speech.flat_start import flat_start
from roundelay.speech.hmm import Monophones, Occurrences, state_labels
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.model import AcousticModel, ModelConfig
from roundelay.speech.segments import FRAME_SHIFT_S

WINDOW, BATCH = 21, 32  # frames of a window, windows of a batch
FIRST_CALL_S, FLAT_START_S, FLAT_START_S_PER_HOUR = 2.0, 3.0, 90.0  # on an idle core, about
MODELS = {  # name: features, states, sizes
    "the recipe an4": (120, 102, ModelConfig()),
    "a network of an4/best": (160, 400, ModelConfig(bottleneck=128, stack=3)),
    "the papers' model": (260, 32_000, ModelConfig(layers=6, width=512, bottleneck=256)),
}


@dataclass(frozen=True)
class Row:
    """One figure: hours of speech that one core handles in an hour, or the memory that hours of speech take."""

    what: str
    hours_per_hour: float | None = None
    memory_MB: float | None = None


def measure(seconds: float, memory_hours: Sequence[float], run: Path | None) -> Iterator[Row]:
    """Rows one by one. `run` is a finished run whose test split is decoded."""
    torch.set_num_threads(1)
    yield Row("features: log-mel, derivatives", _repeated(_features, seconds))
    for name, (features, states, config) in MODELS.items():
        yield Row(f"training: {name}", _repeated(_Training(features, states, config), seconds))
    if run:
        yield Row("decoding: network and search", _decoding(run))
    for hours in memory_hours:
        yield Row(f"flat start on {hours:g} h", memory_MB=_flat_start_memory_MB(hours))


def expected_s(seconds: float, memory_hours: Sequence[float]) -> float:
    """About how long `measure` takes without a run to decode."""
    return (1 + len(MODELS)) * (FIRST_CALL_S + seconds) + sum(
        FLAT_START_S + FLAT_START_S_PER_HOUR * hours for hours in memory_hours
    )


def _repeated(work: object, seconds: float) -> float:
    """Hours of speech per hour: `work()` returns seconds of speech. The first call is not counted."""
    assert callable(work)
    work()
    began, speech_s = time.process_time(), 0.0
    while speech_s == 0 or time.process_time() - began < seconds:
        speech_s += work()
    return float(speech_s / (time.process_time() - began))


def _features() -> float:
    config = FeatureConfig()
    samples = np.random.default_rng(0).uniform(-0.1, 0.1, 10 * config.rate_Hz).astype(np.float32)
    return len(with_deltas(log_mel(samples, config.rate_Hz, config.bins))) * FRAME_SHIFT_S


class _Training:
    """Steps of SGD on random windows."""

    def __init__(self, features: int, states: int, config: ModelConfig) -> None:
        self._model = AcousticModel(features, states, config)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._frames = torch.randn(BATCH, WINDOW, features)
        self._states = torch.randint(0, states, (BATCH * WINDOW,))

    def __call__(self) -> float:
        cross_entropy(self._model(self._frames).flatten(0, 1), self._states).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return BATCH * WINDOW * FRAME_SHIFT_S


def _decoding(run: Path) -> float:
    """Hours per hour of all cores of this process, divided by their number."""
    from roundelay.speech.evaluation import evaluate_run

    return float(1 / evaluate_run(run, "test")["real_time_factor"] / len(os.sched_getaffinity(0)))


def _flat_start_memory_MB(hours: float) -> float:
    """The largest anonymous memory of a process that makes a flat start on so many hours of made-up speech.

    Each stage has one iteration, since its iterations all need the same memory. Memory-mapped features are not counted, since
    the system takes their pages back when it needs them.
    """
    most_kB = 0
    with subprocess.Popen([sys.executable, "-m", "roundelay.bench.speech", str(hours)]) as child:
        while child.poll() is None:
            status = Path(f"/proc/{child.pid}/status").read_text()
            anonymous = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
            most_kB = max([most_kB, *map(int, anonymous)])
            time.sleep(0.02)
    if child.returncode:
        raise RoundelayError(f"the flat start on {hours:g} h failed; its error is above")
    return most_kB / 1000


def made_up_speech(hours: float, folder: Path) -> tuple[FeatureSet, Transcripts]:
    """Features on disk, drawn from one Gaussian for each state, and their transcripts."""
    rng = np.random.default_rng(0)
    lexicon = Lexicon({f"W{i}": [tuple(f"P{p}" for p in rng.integers(0, 30, 4))] for i in range(50)})
    tying = Monophones(lexicon.phones)
    means_SD = rng.normal(scale=2.0, size=(tying.num_states, 40))
    texts: dict[str, str] = {}

    def spoken() -> Iterator[SpeakerFeatures]:
        frames = 0
        while frames * FRAME_SHIFT_S < hours * 3600:
            name, words = f"u{len(texts)}", rng.choice(lexicon.words, 10).tolist()
            said = [tying.number(phone) for word in words for phone in lexicon[word][0]]
            durations = rng.integers(4, 15, len(said) + 2)
            starts = (np.cumsum(durations) - durations).astype(np.int32)
            found = Occurrences(np.array([0, *said, 0], np.int32), starts, int(durations.sum()))
            frames_TD = means_SD[state_labels(found, tying)] + rng.standard_normal((found.num_frames, 40))
            texts[name] = " ".join(words)
            frames += found.num_frames
            yield SpeakerFeatures([name], [frames_TD.astype(np.float16)])

    write_features(folder, "made-up speech", spoken())
    return FeatureSet(folder), Transcripts(texts, lexicon, tying)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        flat_start(*made_up_speech(float(sys.argv[1]), Path(directory)), workers=1, iterations=1)
