"""An acoustic model of Gaussians, which aligns transcripts before there is a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from roundelay.speech.align import Aligner, Alignments, Transcripts, aligned
from roundelay.speech.gaussians import FramesByUtterance, Mixtures
from roundelay.speech.hmm import Floats, self_loops
from roundelay.speech.projection import Projected, Projection
from roundelay.speech.segments import Ints


@dataclass(frozen=True, eq=False)
class Gmm:
    """An acoustic model of Gaussians: a projection of the features, mixtures for each state, and transition probabilities."""

    projection: Projection
    mixtures: Mixtures
    self_loops: Floats

    @classmethod
    def fit(
        cls, features: FramesByUtterance, labels: Mapping[str, Ints], projection: Projection, number_S: Ints
    ) -> Gmm:
        """Fit `number_S` Gaussians to each state of the labelled utterances."""
        mixtures = Mixtures.fit(Projected(features, projection), labels, number_S)
        return cls(projection, mixtures, self_loops(labels.values(), len(number_S)))

    def log_likelihoods(self, frames_TD: NDArray[Any]) -> Floats:
        """T×S ln p(x | s) of unprojected frames."""
        return self.mixtures.log_likelihoods(self.projection(frames_TD))

    def aligned(
        self, features: FramesByUtterance, transcripts: Transcripts, names: Iterable[str], workers: int | None = None
    ) -> Alignments:
        """Align the utterances `names`."""
        frames = {name: features[name] for name in names}
        return aligned(Aligner(self.log_likelihoods, self.self_loops), frames, transcripts, workers)
