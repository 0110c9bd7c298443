"""The word error rate of a finished run: decode a split, score it, and write the usual files into the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roundelay.errors import SpeechError
from roundelay.speech.corpora.manifest import manifest
from roundelay.speech.corpus import Utterance
from roundelay.speech.feature_set import features
from roundelay.speech.hub5 import PARTS, Turn, hub5
from roundelay.speech.prepare import corpus_of
from roundelay.speech.recognise import PASSES, SILENT, Recogniser, references
from roundelay.speech.score import Score, confusions, errors_by_speaker, examples, score
from roundelay.speech.score_files import write_scores
from roundelay.speech.segments import FRAME_SHIFT_S, Segments, write_ctm
from roundelay.training.run_result import RunResult

CONFUSIONS = 20  # pairs of words in evaluation-*.json, the most frequent
EXAMPLES = 12  # utterances with errors in evaluation-*.json


def evaluate_run(run: Path, split: str, data: Path | None = None, passes: int = PASSES) -> dict[str, Any]:
    """WER and further figures of one split of the run's corpus, or of the manifest folder `data`.

    `passes` is how often speech is decoded if the run uses fMLLR (`Recogniser.recognised_in_passes`).

    Writes recogs-*.txt, errs-*.txt, words-*.ctm and evaluation-*.json into the run, and problems-*.txt if there are problems.
    `real_time_factor` is the time for network and search, on all processors of this process, divided by the length of the speech.
    """
    recogniser = Recogniser.of_run(RunResult.read(run))
    corpus = manifest(data) if data else corpus_of(recogniser.config)
    chosen = corpus.split(split)
    found = features(corpus, recogniser.config.logmel)
    frames, problems = found.of(chosen), found.problems_with(corpus)
    recogniser.prepare()
    began = time.perf_counter()
    silent = {detail for kind, detail in found.problems.cases if kind == SILENT}
    by_pass = recogniser.recognised_in_passes(found, [each for each in chosen if each.id not in silent], passes)
    elapsed_s = time.perf_counter() - began
    hypotheses = by_pass[-1]
    scores = [score(references(chosen), {name: each.words for name, each in heard.items()}) for heard in by_pass]
    result = scores[-1]
    suffix = f"{corpus.name}-{split}" if data else split
    write_scores(run, suffix, result)
    times = {name: recogniser.word_times(hypothesis) for name, hypothesis in hypotheses.items()}
    write_ctm(run / f"words-{suffix}.ctm", times, {name: each.confidences for name, each in hypotheses.items()})
    speech_s = sum(map(len, frames.values())) * FRAME_SHIFT_S
    figures = {
        "corpus": corpus.name,
        "split": split,
        "utterances": len(chosen),
        **result.to_json(),
        "real_time_factor": elapsed_s / max(speech_s, FRAME_SHIFT_S),
        "unknown_words": dict(recogniser.lexicon.unknown(utterance.text for utterance in chosen)),
        "unusable": len(chosen) - len(frames),
        "problems": problems.counts(),
        "scales": asdict(recogniser.scales),
        "features": list(recogniser.config.features),
        "speakers": len({utterance.speaker for utterance in chosen}),
        "wer_by_pass": [each.wer for each in scores],
        "confusions": [[*pair, count] for pair, count in confusions(result).most_common(CONFUSIONS)],
        "by_speaker": errors_by_speaker(result, {utterance.id: utterance.speaker for utterance in chosen}),
        "examples": [
            {"name": each.name, "said": " ".join(each.reference), "heard": " ".join(each.hypothesis)}
            for each in examples(result, EXAMPLES)
        ],
    }
    problems.write(run / f"problems-{suffix}.txt")
    if corpus.stm and split == "test":
        figures["parts"] = _parts(result)
    if corpus.stm and corpus.glm and split == "test":
        turns = _turns(chosen, times)
        figures["hub5"] = _hub5(turns, corpus.stm, corpus.glm, run / "hub5")
    (run / f"evaluation-{suffix}.json").write_text(json.dumps(figures, indent=2))
    return figures


def _parts(result: Score) -> dict[str, float]:
    """WER of Switchboard and of CallHome with our own scorer, which lacks NIST's rules for equivalent words."""
    return {
        part: Score(tuple(each for each in result.utterances if each.name.startswith(prefix))).wer
        for part, prefix in PARTS.items()
    }


def _turns(utterances: Sequence[Utterance], times: Mapping[str, Segments]) -> list[Turn]:
    return [
        Turn(utterance.audio.stem, "AB"[utterance.channel or 0], utterance.start_s, times[utterance.id])
        for utterance in utterances
        if utterance.audio and utterance.id in times
    ]


def _hub5(turns: Sequence[Turn], stm: Path, glm: Path, folder: Path) -> dict[str, Any]:
    """Scores of both parts by NIST's programs, or the reason why these cannot run."""
    try:
        return {part: asdict(found) | {"wer": found.wer} for part, found in hub5(turns, stm, glm, folder).items()}
    except SpeechError as error:
        return {"error": str(error)}
