"""Settings of speech recognition, and their check before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roundelay.errors import ConfigError, DataError, unknown
from roundelay.speech.adaptation import KINDS, LOGMEL, IvectorConfig
from roundelay.speech.augment import AugmentConfig
from roundelay.speech.cache import find_corpus
from roundelay.speech.corpora.catalogue import FROM_DATA_FOLDER, NAMES, NEED_A_FOLDER, check_extra
from roundelay.speech.features import FeatureConfig
from roundelay.speech.model import ModelConfig
from roundelay.training.config import TaskConfig, at_least, fraction

GIVEN_TIMES, FLAT_START, PDFS = "given", "flat-start", "pdfs"
NAMED_LABELS = (GIVEN_TIMES, FLAT_START, PDFS)


@dataclass(frozen=True)
class LmConfig:
    """Settings of the language model.

    Attributes:
        arpa: an ARPA file; empty: count the transcripts of the training split.
        order: words in the longest n-grams that are counted.
        smoothing: witten-bell or kneser-ney.
    """

    arpa: str = ""
    order: int = at_least(1, 2)
    smoothing: Literal["witten-bell", "kneser-ney"] = "witten-bell"


@dataclass(frozen=True)
class SpeechConfig(TaskConfig):
    """Settings of speech recognition.

    Attributes:
        corpus: synth, an4, fsdd, librispeech, switchboard, manifest or kaldi.
        data: folder or archive of the corpus; empty: $ROUNDELAY_DATA, or the cache for synth.
        hours: hours of synth to generate.
        labels: given: from the phone times of the corpus. flat-start: from transcripts alone. pdfs: from Kaldi's alignments,
            in the states of its tree. Or a folder with phones.ctm, which `roundelay speech align` writes.
        states: states of the HMM. 0: three for each phone, or those of Kaldi's tree. Otherwise the maximum of tied triphones.
        window: frames of a training sample; 21 in the papers; 0: whole utterances.
        features: logmel; fmllr: 40 features, transformed for each speaker; ivector: numbers that describe the speaker. Those
            that are named are put side by side. All three together have the papers' 260 dimensions.
        label_smoothing: probability that is spread over all states in training.
        allow_pipes: run the commands in Kaldi's wav.scp; only if you trust them.
    """

    corpus: str = "synth"
    data: str = ""
    hours: float = at_least(0.0, 0.5)
    labels: str = GIVEN_TIMES
    states: int = at_least(0, 0)
    window: int = at_least(0, 21)
    allow_pipes: bool = False
    features: tuple[str, ...] = (LOGMEL,)
    label_smoothing: float = fraction(0.0)
    logmel: FeatureConfig = field(default_factory=FeatureConfig)
    ivector: IvectorConfig = field(default_factory=IvectorConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    lm: LmConfig = field(default_factory=LmConfig)

    @property
    def data_path(self) -> Path | None:
        """`data` as a path; None if it is empty."""
        return Path(self.data) if self.data else None


def check(config: SpeechConfig) -> None:
    """Raise ConfigError for settings that cannot work. Needs no data."""
    if config.corpus not in NAMES:
        raise ConfigError(unknown("corpus", config.corpus, NAMES))
    if config.labels == PDFS and config.states:
        raise ConfigError(f"settings.states must be 0, since Kaldi's tree defines the states, got {config.states}")
    for kind in config.features:
        if kind not in KINDS:
            raise ConfigError(unknown("settings.features", kind, KINDS))
    if not config.features or len(set(config.features)) != len(config.features):
        raise ConfigError(f"settings.features needs {', '.join(KINDS)}, each at most once, got {list(config.features)}")
    if config.augment.bins and config.features[0] != LOGMEL:
        raise ConfigError(
            f"settings.augment.bins hides bins of {LOGMEL}, which must be first, got {list(config.features)}"
        )
    if any(speed <= 0 for speed in config.augment.speeds):
        raise ConfigError(f"settings.augment.speeds must be above 0, got {list(config.augment.speeds)}")


def check_data(config: SpeechConfig) -> None:
    """Raise ConfigError if data that the settings name are not there, and MissingExtraError if their libraries are not.

    The corpus is located, but not read.
    """
    check_extra(config.corpus)
    if config.corpus in NEED_A_FOLDER and not config.data:
        raise ConfigError(f"settings.data is empty; a {config.corpus} corpus needs its folder (--data DIR)")
    if config.data and not Path(config.data).exists():
        raise ConfigError(f"settings.data: there is no '{config.data}'")
    if config.corpus in FROM_DATA_FOLDER:
        try:
            find_corpus(config.corpus, config.data_path)
        except DataError as error:
            raise ConfigError(f"settings.data: {error}") from None
    if config.labels not in NAMED_LABELS and not (Path(config.labels) / "phones.ctm").is_file():
        raise ConfigError(
            f"settings.labels must be {', '.join(NAMED_LABELS)} or a folder with phones.ctm, got '{config.labels}'"
        )
    if config.lm.arpa and not Path(config.lm.arpa).is_file():
        raise ConfigError(f"settings.lm.arpa: there is no file '{config.lm.arpa}'")
