"""Switchboard for training and Hub5-2000 for testing, from the files of the LDC, anywhere below one folder.

sw02001.sph …               LDC97S62: calls, two channels of µ-law at 8 kHz
sw2001A-ms98-a-trans.text … the Mississippi State transcripts (swb_ms98_transcriptions), read with lhotse
sw-ms98-dict.text           the lexicon of the transcripts
sw_4390.sph, en_4156.sph …  LDC2002S09: Hub5-2000, calls of Switchboard (sw) and CallHome (en)
hub5e00.*.stm, *.glm        LDC2002T43: references and scoring rules of Hub5-2000
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundelay.errors import DataError
from roundelay.speech.cache import cache_folder, find_corpus, fingerprint, state_of
from roundelay.speech.corpus import Corpus, Problems, Utterance
from roundelay.speech.libraries import library
from roundelay.training.checkpoint import write_whole

VALID_EVERY = 50  # one call in so many is held out for validation, with both speakers
SIDES = "AB"
_IGNORED = "ignore_time_segment_in_scoring"


def switchboard(data: Path | None = None) -> Corpus:
    """The splits train and valid from Switchboard, test from Hub5-2000; one of the two corpora is enough."""
    root = find_corpus("switchboard", data)
    problems = Problems()
    stm = next(iter(sorted(root.rglob("hub5*.stm"))), None)
    utterances = list(_training(root, problems))
    if stm:
        utterances.extend(_test(root, stm, problems))
    if not utterances:
        raise DataError(f"'{root}' has neither calls sw0….sph with their …-trans.text nor a hub5….stm")
    return Corpus(
        "switchboard",
        tuple(utterances),
        "Switchboard-1 with Mississippi State transcripts; Hub5-2000 as test",
        lexicon=_lexicon(root),
        problems=problems,
        stm=stm,
        glm=next(iter(sorted(root.rglob("*.glm"))), None),
    )


def transcript(text: str) -> str:
    """The words of a Mississippi State transcript, in small letters.

    [noise], [silence] and [laughter] are dropped; [laughter-word] becomes word. Of [this/that], this was said. {coined} and
    about_1 lose their marks. In th[e]-, the letters in brackets were not said; a hyphen takes their place.

    >>> transcript("[noise] i-[i] was [laughter-really] th[e]- [laughter] about_1 [it'n/isn't] {yuppiedom} [silence]")
    "i- was really th- about it'n yuppiedom"
    >>> transcript("[lem[guini]-/linguini] them_1's ab[solute] ammu[n]it- -[an]y [laughter-y[ou]-]")
    "lem- them's ab- ammu-it- -y y-"
    """
    return " ".join(filter(None, map(_word, text.lower().split())))


def reference(text: str) -> str:
    """The words of an stm line: the first of alternatives, and no optional words.

    >>> reference("(%hesitation) i { don't / do not / @ } know <b_aside> (wh-) right")
    "i don't know right"
    """
    chosen = re.sub(r"\{\s*([^/}]*?)\s*(?:/[^}]*)?\}", r"\1", text.lower())
    kept = re.sub(r"\([^)]*\)|<[^>]*>", " ", chosen)
    return " ".join(word for word in kept.split() if word != "@")


def _word(token: str) -> str:
    token = re.sub(r"^(-?)\[laughter-(.+)\](-?)$", r"\1\2\3", token)
    token = re.sub(r"^-?\[(.+)/[^/]+\]-?$", r"\1", token)  # [it'n/isn't], [lem[guini]-/linguini]
    if re.fullmatch(r"\[[^\]]+\]|<[^>]+>", token):
        return ""
    token = re.sub(r"^-?\[[^\[\]]*\]-?", "-", token)  # -[o]kay: the bracket was not said
    token = re.sub(r"-?\[[^\[\]]*\]-?$", "-", token)  # sim[ilar]-, ab[solute], i-[i]
    token = re.sub(r"\[[^\[\]]*\]", "-", token)  # ammu[n]it-
    return re.sub(r"_\d(?=$|')", "", token.strip("{}"))


def _lexicon(root: Path) -> Path | None:
    """The lexicon of the transcripts with words as `transcript` writes them, in the cache."""
    source = next(iter(sorted(root.rglob("sw-ms98-dict.text"))), None)
    if source is None:
        return None
    lines = []
    for line in source.read_text(encoding="latin-1").lower().splitlines():
        token, *phones = line.split() or [""]
        if phones and not line.startswith("#") and (word := _word(token)):
            lines.append(f"{word} {' '.join(phones)}\n")
    path = cache_folder("corpora") / f"switchboard-{fingerprint(source.resolve(), state_of(source), lines)}.dic"
    write_whole(path, "".join(lines).encode())
    return path


def _training(root: Path, problems: Problems) -> Iterator[Utterance]:
    transcripts = {path.name.split("-")[0]: path for path in sorted(root.rglob("sw*-trans.text"))}
    calls = sorted(root.rglob("sw0*.sph"))
    for number, audio in enumerate(calls):
        call = audio.stem.replace("sw0", "sw")
        split = "valid" if number % VALID_EVERY == 1 else "train"
        for channel, side in enumerate(SIDES):
            text = transcripts.get(f"{call}{side}")
            if text is None:
                problems.add("no transcript", f"side {side} of {audio.name}")
            else:
                yield from _side(audio, text, channel, split, problems)


def _side(audio: Path, text: Path, channel: int, split: str, problems: Problems) -> Iterator[Utterance]:
    """The utterances of one side of a call. lhotse gives both sides the same speaker, so the channel is added."""
    lhotse = _lhotse()
    try:
        with lhotse.audio.backend.audio_backend(lhotse.audio.backend.LibsndfileBackend()):
            recording = lhotse.Recording.from_file(audio)
        supervisions = lhotse.recipes.switchboard.make_segments(text, recording, channel)
    except Exception as error:  # lhotse raises many kinds of errors for broken files; only this side is lost
        reason = (str(error) or type(error).__name__).splitlines()[0]
        problems.add("unreadable call", f"{audio.name}, {text.name}: {reason}")
        return
    for supervision in supervisions:
        words = transcript(supervision.text)
        if words and supervision.end <= recording.duration:
            yield Utterance(
                id=supervision.id,
                audio=audio,
                speaker=f"{recording.id}-{SIDES[channel]}",
                text=words,
                split=split,
                channel=channel,
                start_s=supervision.start,
                duration_s=supervision.duration,
            )
        else:
            problems.add("beyond the end" if words else "no words", supervision.id)


def _test(root: Path, stm: Path, problems: Problems) -> Iterator[Utterance]:
    calls = {path.stem: path for path in root.rglob("*.sph")}
    for line in stm.read_text(encoding="latin-1").splitlines():
        if not line.strip() or line.startswith(";;"):
            continue
        fields = line.split(maxsplit=6)
        try:
            call, side, speaker, start, end = fields[0], fields[1], fields[2], float(fields[3]), float(fields[4])
        except (IndexError, ValueError):
            problems.add("bad line", f"{stm.name}: {line.strip()}")
            continue
        text = fields[6] if len(fields) > 6 else ""
        id = f"{call}-{side}-{round(start * 100):07d}-{round(end * 100):07d}"
        if _IGNORED not in text.lower():
            audio, channel = calls.get(call, root / f"{call}.sph"), SIDES.find(side.upper())
            yield Utterance(id, audio, speaker, reference(text), "test", channel, start, end - start)


def _lhotse() -> Any:  # noqa: ANN401  # a module
    for name in ("lhotse.audio.backend", "lhotse.recipes.switchboard"):
        library(name, "reading Switchboard", "switchboard")
    return library("lhotse", "reading Switchboard", "switchboard")
