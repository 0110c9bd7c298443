"""The training task of speech recognition: windows of frames in, states of the HMM out."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundelay.speech.augment import masked
from roundelay.speech.config import SpeechConfig, check, check_data
from roundelay.speech.model import AcousticModel, Ensemble, acoustic_model
from roundelay.speech.prepare import UNLABELLED, Prepared, prepared
from roundelay.speech.windows import Rows, Whole, Windows, windows_of
from roundelay.training import run_directory
from roundelay.training.task import Task

EVALUATION_BATCH, WHOLE_AT_ONCE = 256, 8  # windows, or whole utterances, per batch of `evaluate`

# frames_BTF; states_BT, where UNLABELLED frames do not count; with whole utterances also lengths_B.
FramesAndStates = tuple[Tensor, ...]
log = logging.getLogger("roundelay")


class Speech(Task):
    """A hybrid acoustic model: frame cross-entropy −log p(s|x) over windows, or whole utterances, of an aligned corpus.

    A training sample is a window or an utterance. The samples that `evaluate` counts are frames.
    """

    Config = SpeechConfig
    config: SpeechConfig

    def __init__(self, config: SpeechConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.prepared: Prepared = prepared(config)
        if multiprocessing.parent_process() is None:  # not again in every process of a data loader
            for line in self.prepared.problems.summary():
                log.warning("%s: %s", self.prepared.corpus.name, line)
            for split in ("valid", "test"):
                if split in self.prepared.corpus.splits and not self.prepared.spans(split):
                    log.warning(
                        "no utterance of %s has labels, so its loss and accuracy are unknown (nan); "
                        "`roundelay evaluate` gives its word errors",
                        split,
                    )
        self._windows = self._windows_of("train")

    def __reduce__(self) -> tuple[type[Speech], tuple[SpeechConfig, int]]:
        return type(self), (self.config, self.seed)  # a data loader's process maps features and labels itself

    @classmethod
    def check(cls, config: SpeechConfig) -> None:
        """Raise ConfigError for settings that cannot work."""
        check(config)

    @classmethod
    def check_data(cls, config: SpeechConfig) -> None:
        """Raise ConfigError if the corpus, the labels or the language model are not there."""
        check_data(config)

    def _windows_of(self, split: str) -> Windows | Whole:
        return windows_of(self.prepared.spans(split), self.config.window)

    def __len__(self) -> int:
        return len(self._windows)

    def module(self) -> nn.Module:
        """The acoustic model for the features and states of the corpus, with weights drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return acoustic_model(self.prepared.features.dimension, self.prepared.tying.num_states, self.config.model)

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> FramesAndStates:
        """Training windows or utterances, shifted and masked at random."""
        limit = self.config.augment.shift
        shift = torch.randint(-limit, limit + 1, (len(samples),), generator=generator).numpy() if limit else None
        frames_BTF, *others = self._gathered(*self._windows.rows(np.asarray(samples), shift))
        return masked(frames_BTF, self.config.logmel.bins, self.config.augment, generator), *others

    def _gathered(self, rows_BT: Rows, counts_BT: NDArray[np.bool_]) -> FramesAndStates:
        frames_BTF = self.prepared.features.frames_NF[rows_BT].astype(np.float32)
        states_BT = np.where(counts_BT, self.prepared.labels_N[rows_BT], UNLABELLED).astype(np.int64)
        gathered = torch.from_numpy(frames_BTF), torch.from_numpy(states_BT)
        return gathered if self.config.window else (*gathered, torch.from_numpy(counts_BT.sum(axis=1)))

    def loss(self, module: nn.Module, batch: FramesAndStates) -> Tensor:
        """Cross-entropy per frame with smoothed labels, the mean of the model's networks."""
        frames_BTF, states_BT, *lengths_B = batch
        networks = cast("AcousticModel | Ensemble", module).members
        logits = [network(frames_BTF, *lengths_B).flatten(0, 1) for network in networks]
        smoothing = self.config.label_smoothing
        losses = [
            cross_entropy(each, states_BT.flatten(), ignore_index=UNLABELLED, label_smoothing=smoothing)
            for each in logits
        ]
        return torch.stack(losses).mean()

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Sums over the frames of a split: their number, cross-entropy, and how many get the right state."""
        windows = self._windows_of(split)
        device = next(module.parameters()).device
        sums = dict.fromkeys(("samples", "loss", "accuracy"), 0.0)
        chosen = np.arange(part, len(windows), parts)
        at_once = EVALUATION_BATCH if self.config.window else WHOLE_AT_ONCE
        for first in range(0, len(chosen), at_once):
            which = chosen[first : first + at_once]
            frames_BTF, states_BT, *lengths_B = self.to_device(self._gathered(*windows.rows(which)), device)
            logits, states = module(frames_BTF, *lengths_B).flatten(0, 1), states_BT.flatten()
            sums["samples"] += float((states != UNLABELLED).sum())
            sums["loss"] += float(cross_entropy(logits, states, ignore_index=UNLABELLED, reduction="sum"))
            sums["accuracy"] += float((logits.argmax(1) == states).sum())
        return sums

    def leave(self, run: Path) -> None:
        """Save what decoding needs beside the network, so that the run works without its corpus."""
        from roundelay.speech.recognise import FOLDER, save_recogniser

        save_recogniser(self.prepared, self.config, run / FOLDER)
        self.prepared.problems.write(run / run_directory.PROBLEMS)

    @classmethod
    def evaluate_run(cls, run: Path, split: str, data: Path | None = None, passes: int | None = None) -> dict[str, Any]:
        """Decode and score a split of the run's corpus, or of the corpus in the folder `data`, with the run's mean model."""
        from roundelay.speech.evaluation import evaluate_run
        from roundelay.speech.recognise import PASSES

        return evaluate_run(run, split, data, passes or PASSES)
