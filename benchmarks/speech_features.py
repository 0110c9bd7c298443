"""Speed of computing features: seconds of speech per second of one core, with reading the audio.

python benchmarks/speech_features.py --corpus an4
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from roundelay.speech.corpora.catalogue import corpus
from roundelay.speech.corpus import Utterance
from roundelay.speech.features import FeatureConfig, speaker_features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="an4")
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    speakers: dict[str, list[Utterance]] = {}
    for utterance in corpus(arguments.corpus, arguments.data).utterances:
        speakers.setdefault(utterance.speaker, []).append(utterance)
    first, *others = speakers.values()
    speaker_features(first, FeatureConfig())  # warm-up: windows and filters are computed once and cached
    began = time.process_time()
    speech_s = sum(speaker_features(utterances, FeatureConfig()).audio_s for utterances in others)
    elapsed_s = time.process_time() - began
    print(f"{speech_s:.0f} s of speech in {elapsed_s:.2f} s of one core: {speech_s / elapsed_s:.0f} × real time")


if __name__ == "__main__":
    main()
