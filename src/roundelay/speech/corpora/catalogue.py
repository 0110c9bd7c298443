"""Corpora by name, for recipes and for the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roundelay.errors import DataError, check_installed, unknown
from roundelay.speech.corpora.an4 import an4
from roundelay.speech.corpora.fsdd import fsdd
from roundelay.speech.corpora.kaldi import kaldi
from roundelay.speech.corpora.librispeech import librispeech
from roundelay.speech.corpora.manifest import manifest
from roundelay.speech.corpora.switchboard import switchboard
from roundelay.speech.corpus import Corpus
from roundelay.speech.synth.generate import synth

# Without a path these are looked for in $ROUNDELAY_DATA.
FROM_DATA_FOLDER: dict[str, Callable[[Path | None], Corpus]] = {
    "an4": an4,
    "fsdd": fsdd,
    "librispeech": librispeech,
    "switchboard": switchboard,
}
NEED_A_FOLDER = ("manifest", "kaldi")
NAMES = ("synth", *FROM_DATA_FOLDER, *NEED_A_FOLDER)


def check_extra(name: str) -> None:
    """Raise MissingExtraError if the libraries are not installed that a corpus of this name needs."""
    if name == "synth":
        check_installed("espeakng_loader", "synthetic speech", "synth")
    if name == "switchboard":
        check_installed("lhotse", "reading Switchboard", "switchboard")
    check_installed("soundfile", "reading and writing audio", "speech")


def corpus(name: str, data: Path | None = None, *, allow_pipes: bool = False) -> Corpus:
    """The corpus of a name, from the folder or archive `data`, by default from $ROUNDELAY_DATA.

    `synth` without `data` is generated in the cache. `allow_pipes` lets Kaldi's wav.scp run commands.

    >>> corpus("an5")
    Traceback (most recent call last):
    roundelay.errors.DataError: unknown corpus 'an5'; did you mean 'an4'? Known: synth, an4, fsdd, ...
    """
    if name in FROM_DATA_FOLDER:
        return FROM_DATA_FOLDER[name](data)
    if name == "synth":
        return synth() if data is None else manifest(data, "synth")
    if name not in NEED_A_FOLDER:
        raise DataError(unknown("corpus", name, NAMES))
    if data is None:
        raise DataError(f"a {name} corpus needs its folder, got none; give it with --data")
    return kaldi(data, allow_pipes=allow_pipes) if name == "kaldi" else manifest(data)
