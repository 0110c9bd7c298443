"""The speech synthesiser espeak-ng, called through its C library: samples, and the time of each phoneme."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roundelay.errors import RoundelayError
from roundelay.speech.libraries import library

Sound: TypeAlias = NDArray[np.int16]

# Constants of espeak-ng's speak_lib.h.
_SYNCHRONOUS, _PHONEME_EVENTS, _DONT_EXIT = 2, 1, 0x8000
_CHARACTERS, _UTF8, _PHONEMES = 1, 1, 0x100  # without the last, [[ ]] is read aloud letter by letter
_PARAMETERS = {"rate": 1, "pitch": 3, "range": 4}
_VOLUME = (2, 60)  # percent; at 100 some voices clip
_WORD, _END, _PHONEME = 1, 5, 7


@dataclass(frozen=True)
class Voice:
    """A voice: espeak-ng's name of accent and variant, words per minute, pitch and its range (0 to 100)."""

    name: str
    rate: int = 175
    pitch: int = 50
    range: int = 50


@dataclass(frozen=True)
class Event:
    """What begins at a sample: a phoneme (`name` is its mnemonic), a word (empty name), or the end ('end')."""

    sample: int
    name: str


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


class Espeak:
    """The synthesiser. Its state is global to the process, and its output depends on everything it has said before.

    The same samples come again only in a fresh process, with the same seed and the same order of calls.
    """

    def __init__(self, seed: int) -> None:
        espeakng_loader = library("espeakng_loader", "synthetic speech", "synth")
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        options = _PHONEME_EVENTS | _DONT_EXIT
        self.rate_Hz: int = self._library.espeak_Initialize(
            _SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), options
        )
        if self.rate_Hz <= 0:
            raise RoundelayError("espeak-ng does not start; reinstall the package espeakng-loader")
        self._callback = _Callback(self._collect)  # kept in an attribute, because the library holds no reference
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
        self._pieces: list[Sound] = []
        self._events: list[Event] = []

    def say(self, voice: Voice, mnemonics: str) -> tuple[Sound, list[Event]]:
        """Samples and events of phonemes, which are given as mnemonics in [[ ]]."""
        if self._library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise RoundelayError(f"espeak-ng has no voice '{voice.name}'")
        for name, number in _PARAMETERS.items():
            self._library.espeak_SetParameter(number, getattr(voice, name), 0)
        self._pieces, self._events = [], []
        text = mnemonics.encode()
        self._library.espeak_SetParameter(*_VOLUME, 0)
        self._library.espeak_Synth(text, len(text) + 1, 0, _CHARACTERS, 0, _UTF8 | _PHONEMES, None, None)
        self._library.espeak_Synchronize()
        return np.concatenate(self._pieces), self._events

    def _collect(self, samples: Any, count: int, events: Any) -> int:  # noqa: ANN401  # C pointers
        if count:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        position = 0
        while (event := events[position]).type:
            if event.type == _PHONEME:
                self._events.append(Event(event.sample, event.id.string.decode()))
            elif event.type in (_WORD, _END):
                self._events.append(Event(event.sample, "" if event.type == _WORD else "end"))
            position += 1
        return 0
