"""Memory of the flat start for many hours of speech: the most that one process allocates, without mapped files.

python benchmarks/speech_flat_start.py --hours 0.5 1 2

Synthetic speech of 0.2 hours is repeated under other names, since memory depends on the number of frames and utterances, and not
on what is said. Each number of hours has its own process. Each stage has one round of alignment: more need no more memory.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

from roundelay.speech.align import Transcripts
from roundelay.speech.cache import cache_folder
from roundelay.speech.feature_set import FeatureSet, features, write_features
from roundelay.speech.features import SpeakerFeatures
from roundelay.speech.flat_start import flat_start
from roundelay.speech.hmm import Monophones
from roundelay.speech.prepare import lexicon_of
from roundelay.speech.segments import FRAME_SHIFT_S
from roundelay.speech.synth.generate import synth
from roundelay.speech.synth.shard import SynthConfig

SOURCE_HOURS = 0.2


def allocated_MiB() -> float:
    """Memory of this process that is not a mapped file."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def measured(hours: float) -> None:
    """Print the figures of one size."""
    corpus = synth(SynthConfig(hours=SOURCE_HOURS))
    source, lexicon = features(corpus), lexicon_of(corpus)
    texts: dict[str, str] = {}

    def repeated() -> Iterator[SpeakerFeatures]:
        frames = repetition = 0
        while True:
            for utterance in corpus.utterances:
                if utterance.id not in source:
                    continue
                if frames * FRAME_SHIFT_S >= hours * 3600:
                    return
                name = f"{utterance.id}-{repetition}"
                texts[name] = utterance.text
                frames += len(source[utterance.id])
                yield SpeakerFeatures([name], [source[utterance.id]])
            repetition += 1

    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        write_features(Path(folder), "repeated", repeated())
        speech = FeatureSet(Path(folder))
        before, most, done = allocated_MiB(), [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                most[0] = max(most[0], allocated_MiB())

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        flat_start(speech, Transcripts(texts, lexicon, Monophones(lexicon.phones)), workers=1, iterations=1)
        elapsed = time.perf_counter() - began
        done.set()
        watcher.join()
    print(
        f"{hours:g} h, {len(texts)} utterances: {before:.0f} MiB before, at most {most[0]:.0f} MiB; {elapsed:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    for hours in parser.parse_args().hours:
        process = get_context("spawn").Process(target=measured, args=(hours,))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
