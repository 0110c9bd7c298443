"""Speech frames with phone labels, straight from the AN4 archive: log-mel features and the phones of its alignment."""

from __future__ import annotations

import csv
import io
import os
import tarfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundelay.errors import MissingExtraError
from roundelay.simulation.problems import Examples, Problem

ARCHIVE = "an4.tar.xz"
CONTEXT = 5  # frames on each side
EVERY = 2  # neighbouring frames say nearly the same
MEL_BINS, FRAME_S = 40, 0.01
CACHE = "an4-frames-1.npz"


def archive() -> Path | None:
    """The AN4 archive in $ROUNDELAY_DATA, if it is there."""
    folder = os.environ.get("ROUNDELAY_DATA")
    path = Path(folder) / ARCHIVE if folder else None
    return path if path is not None and path.is_file() else None


def an4_frames(path: Path, hidden: tuple[int, ...]) -> Problem:
    """Spliced frames of the training speakers, those of the validation speakers held out; read once, then cached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "roundelay" / CACHE
    if not cache.is_file():
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, allow_pickle=False, **_read(path))
        partial.replace(cache)
    with np.load(cache, allow_pickle=False) as arrays:
        train, held_out = _examples(arrays, "train"), _examples(arrays, "valid")
    mean, std = train[0].mean(dim=0), train[0].std(dim=0)
    return Problem(((train[0] - mean) / std, train[1]), ((held_out[0] - mean) / std, held_out[1]), hidden)


def _examples(arrays: Any, split: str) -> Examples:  # noqa: ANN401
    features = torch.from_numpy(arrays[f"{split}_x"].astype(np.float32))
    return features, torch.from_numpy(arrays[f"{split}_y"].astype(np.int64))


def _read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with tarfile.open(path) as tar:
        files = {member.name.removeprefix("an4/"): tar.extractfile(member) for member in tar if member.isfile()}
        content = {name: file.read() for name, file in files.items() if file is not None}
    phones = _phones(content["align/phones.ctm"].decode())
    names = sorted({phone for spans in phones.values() for *_, phone in spans})
    found: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "valid": []}
    for row in csv.DictReader(io.StringIO(content["MANIFEST.tsv"].decode()), delimiter="\t"):
        spans = phones.get(Path(row["path"]).stem)
        if row["split"] in found and spans:
            found[row["split"]].append(_utterance(content[row["path"]], spans, names))
    arrays = {}
    for split, utterances in found.items():
        arrays[f"{split}_x"] = torch.cat([x for x, _ in utterances]).numpy().astype(np.float16)
        arrays[f"{split}_y"] = torch.cat([y for _, y in utterances]).numpy().astype(np.uint8)
    return arrays


def _phones(ctm: str) -> dict[str, list[tuple[float, float, str]]]:
    """Begin, end and name of every phone, by utterance."""
    spans: dict[str, list[tuple[float, float, str]]] = {}
    for line in ctm.splitlines():
        if line and not line.startswith("#"):
            utterance, _, begin, length, phone, _ = line.split()
            spans.setdefault(utterance, []).append((float(begin), float(begin) + float(length), phone))
    return spans


def _utterance(wav: bytes, spans: list[tuple[float, float, str]], names: list[str]) -> tuple[Tensor, Tensor]:
    """Every second frame with its context, and the phone at its middle."""
    features = _log_mel(wav)
    padded = torch.cat([features[:1].expand(CONTEXT, -1), features, features[-1:].expand(CONTEXT, -1)])
    spliced = padded.unfold(0, 2 * CONTEXT + 1, 1).reshape(len(features), -1)
    middles = (np.arange(len(features)) + 0.5) * FRAME_S
    at = np.searchsorted([end for _, end, _ in spans], middles).clip(max=len(spans) - 1)
    labels = torch.tensor([names.index(spans[place][2]) for place in at])
    return spliced[::EVERY], labels[::EVERY]


def _log_mel(wav: bytes) -> Tensor:
    try:
        import kaldi_native_fbank as knf
    except ImportError as error:
        raise MissingExtraError("reading speech frames", "speech") from error
    with wave.open(io.BytesIO(wav)) as file:
        rate, audio = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)
    options = knf.FbankOptions()
    options.mel_opts.num_bins, options.frame_opts.samp_freq, options.frame_opts.dither = MEL_BINS, rate, 0.0
    options.frame_opts.snip_edges = False
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(rate, (audio / 32768.0).astype(np.float32).tolist())
    bank.input_finished()
    frames = torch.from_numpy(np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)]))
    return frames - frames.mean(dim=0)
