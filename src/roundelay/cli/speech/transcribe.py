"""`roundelay speech transcribe`: the words in audio files, recognised by the model of a finished run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from roundelay.cli.arguments import positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="folder of a finished run of speech recognition")
    add("files", metavar="FILE", type=Path, nargs="+", help="audio: WAV, FLAC, sphere, ...; any rate, any channels")
    add("--one-speaker", action="store_true", help="all files are of one speaker (default: every file has its own)")
    add(
        "--passes",
        metavar="N",
        type=positive_int,
        default=2,
        help="with fMLLR: decoding passes; each later pass adapts by the words of the previous one (default 2)",
    )
    add("--json", action="store_true", help="print JSON, with times and confidences of the words")


def run(args: argparse.Namespace) -> int:
    """Print one line per file. A file that cannot be used is named on stderr and makes the exit code 1."""
    from roundelay.speech.confidence import shown_words
    from roundelay.speech.recognise import Recogniser, transcribed
    from roundelay.training.run_result import RunResult

    recogniser = Recogniser.of_run(RunResult.read(args.run))
    hypotheses, problems = transcribed(recogniser, args.files, args.passes, one_speaker=args.one_speaker)
    if args.json:
        document = [
            {
                "file": str(path),
                "text": " ".join(shown_words(hypothesis)),
                "words": [
                    {
                        "word": word,
                        "start_s": start_s,
                        "end_s": round(start_s + length_s, 6),
                        "confidence": round(sure, 4),
                    }
                    for (word, start_s, length_s), sure in zip(
                        recogniser.word_times(hypothesis), hypothesis.confidences, strict=True
                    )
                ],
            }
            for path, hypothesis in hypotheses.items()
        ]
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        for path, hypothesis in hypotheses.items():
            print(f"{path}: {' '.join(shown_words(hypothesis))}")
    for problem in problems:
        print(f"roundelay: {problem}", file=sys.stderr)
    return 1 if len(hypotheses) < len(set(args.files)) else 0
