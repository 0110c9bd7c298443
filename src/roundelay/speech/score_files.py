"""Files with transcripts and errors, in the form that icefall writes them."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from roundelay.errors import SpeechError
from roundelay.speech.score import GAP, Pair, Score, UtteranceScore, confusions, score


def write_scores(folder: str | Path, suffix: str, result: Score) -> tuple[Path, Path]:
    """Write `recogs-SUFFIX.txt` with reference and hypothesis of each utterance, and `errs-SUFFIX.txt` with all errors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    recogs, errs = folder / f"recogs-{suffix}.txt", folder / f"errs-{suffix}.txt"
    with recogs.open("w", encoding="utf-8") as file:
        for u in result.utterances:
            file.write(f"{u.name}:\tref={list(u.reference)}\n{u.name}:\thyp={list(u.hypothesis)}\n")
    errs.write_text(_error_report(result), encoding="utf-8")
    return recogs, errs


def read_recogs(path: str | Path) -> Score:
    """The score of a `recogs-*.txt`, so that finished runs can be compared without decoding again."""
    texts: dict[str, dict[str, list[str]]] = {"ref": {}, "hyp": {}}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            name, _, text = line.rpartition(":\t")
            side, _, words = text.partition("=")
            texts[side][name] = ast.literal_eval(words)
        except (KeyError, ValueError, SyntaxError) as error:
            raise SpeechError(f"{path}:{number} is not a line of recogs-*.txt: '{line}'") from error
    return score(texts["ref"], texts["hyp"])


def _error_report(result: Score) -> str:
    low, high = result.ci95()
    lines = [
        f"%WER {100 * result.wer:.2f} [{result.errors} / {result.words}, {result.insertions} ins, {result.deletions} del, "
        f"{result.substitutions} sub ]",
        f"%SER {100 * result.sentence_error:.2f}",
        f"95 % interval of the WER: {100 * low:.2f} to {100 * high:.2f}",
        "",
        "PER-UTT DETAILS: corr or (ref->hyp)",
        *(f"{u.name}:\t{_marked(u)}" for u in result.utterances),
    ]
    pairs = confusions(result)
    for title, keep in (
        ("SUBSTITUTIONS: count ref -> hyp", lambda ref, hyp: GAP not in {ref, hyp}),
        ("DELETIONS: count ref", lambda ref, hyp: hyp == GAP),
        ("INSERTIONS: count hyp", lambda ref, hyp: ref == GAP),
    ):
        chosen = sorted((-count, pair) for pair, count in pairs.items() if keep(*pair))
        lines += ["", title, *(f"{-count}   {_arrow(pair)}" for count, pair in chosen)]
    return "\n".join([*lines, "", *_per_word(result)]) + "\n"


def _marked(utterance: UtteranceScore) -> str:
    return " ".join(ref if ref == hyp else f"({ref}->{hyp})" for ref, hyp in utterance.pairs)


def _arrow(pair: Pair) -> str:
    return " -> ".join(word for word in pair if word != GAP)


def _per_word(result: Score) -> list[str]:
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for u in result.utterances:
        for ref, hyp in u.pairs:
            (right if ref == hyp else wrong)[ref if ref != GAP else hyp] += 1
    rows = sorted((-wrong[word], word) for word in {*right, *wrong})
    return ["PER-WORD: word corr errs", *(f"{word}   {right[word]} {-errors}" for errors, word in rows)]
