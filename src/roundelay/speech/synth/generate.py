"""A corpus of synthetic speech with exact phone times, of any length. Equal settings give equal files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from roundelay.errors import DataError, check_installed
from roundelay.speech.cache import cache_folder, fingerprint, locked
from roundelay.speech.corpora.manifest import manifest, write_manifest
from roundelay.speech.corpus import Corpus
from roundelay.speech.segments import segments, write_ctm
from roundelay.speech.synth.lexicon import dictionary
from roundelay.speech.synth.shard import Row, SynthConfig, command

COLUMNS = ("id", "path", "split", "speaker", "voice", "seconds", "text")
VERSION = 1  # part of the cache's key: raise it when the generated speech changes, so that an old corpus is not used
RECORD = "synth.json"  # written last: its presence means that the corpus is complete
Progress = Callable[[float, float], None]


def synth(
    config: SynthConfig | None = None,
    folder: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The corpus in a folder, by default in the cache. It is generated if it is not there.

    `workers` is the number of processes, by default one per available processor; the result does not depend on it.
    `progress(done_s, total_s)` counts seconds of speech.
    """
    config = config or SynthConfig()
    if config.hours <= 0:
        raise DataError(f"a corpus needs more than 0 hours, got {config.hours:g}")
    place = folder or cache_folder("corpora") / f"synth-{fingerprint(VERSION, config, _versions())}"
    with locked(place.with_name(f"{place.name}.lock")):
        if not _is_there(place, config):
            _make(place, config, workers or len(os.sched_getaffinity(0)), progress)
    corpus = manifest(place, "synth")
    return corpus.replace(description=f"synthetic speech of espeak-ng: {_in_words(config)}, phones of CMUdict")


def _versions() -> tuple[str, ...]:
    check_installed("espeakng_loader", "synthetic speech", "synth")
    return tuple(version(name) for name in ("espeakng-loader", "numpy"))


def _in_words(config: SynthConfig) -> str:
    noise = "quiet" if config.snr_dB is None else f"noise at {config.snr_dB:g} dB"
    return f"seed {config.seed}, {noise}, {'telephone, 8 kHz' if config.telephone else '16 kHz'}"


def _is_there(folder: Path, config: SynthConfig) -> bool:
    record = folder / RECORD
    if record.is_file():
        if json.loads(record.read_text())["config"] != asdict(config):
            raise DataError(f"'{folder}' holds another synthetic corpus (see its {RECORD}); choose another folder")
        return True
    if folder.is_dir() and {path.name for path in folder.iterdir()} - {"audio", "align", "lexicon"}:
        raise DataError(f"'{folder}' is not empty; choose another folder")
    return False


def _make(folder: Path, config: SynthConfig, workers: int, progress: Progress | None) -> None:
    """Generate shards until the hours are reached. Utterances beyond the hours are deleted."""
    versions = _versions()
    for name in ("align", "lexicon"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "audio", ignore_errors=True)
    rows: list[Row] = []
    wanted_s, done_s = config.hours * 3600, 0.0
    for shard in _shards(folder, config, workers):
        for row in shard:
            if done_s < wanted_s:
                rows.append(row)
                done_s += row["seconds"]
        if progress:
            progress(min(done_s, wanted_s), wanted_s)
        if done_s >= wanted_s:
            break
    _remove_others(folder / "audio", {folder / row["path"] for row in rows})
    write_manifest(
        folder / "manifest.tsv",
        ({name: f"{row[name]:.6f}" if name == "seconds" else row[name] for name in COLUMNS} for row in rows),
    )
    for kind in ("phones", "words"):
        write_ctm(folder / "align" / f"{kind}.ctm", {row["id"]: segments(row[kind]) for row in rows})
    (folder / "lexicon" / "synth.dic").write_text(dictionary())
    (folder / RECORD).write_text(json.dumps({"config": asdict(config), "versions": versions}, indent=2) + "\n")


def _shards(folder: Path, config: SynthConfig, workers: int) -> Iterator[list[Row]]:
    """All shards in order, without end; `workers` of them are made in parallel."""
    pending: list[Future[list[Row]]] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for number in range(10**9):
                pending.append(pool.submit(_run, folder, number, config))
                if len(pending) >= workers:
                    yield pending.pop(0).result()
        finally:
            for future in pending:
                future.cancel()


def _run(folder: Path, shard: int, config: SynthConfig) -> list[Row]:
    done = subprocess.run(command(folder, shard, config), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()
        raise DataError(f"shard {shard} of the synthetic corpus failed: {reason[-1] if reason else done.returncode}")
    rows: list[Row] = json.loads(done.stdout)
    return rows


def _remove_others(audio: Path, kept: set[Path]) -> None:
    """Delete audio files that are not in `kept`, and empty folders."""
    for path in audio.rglob("*.wav"):
        if path not in kept:
            path.unlink()
    for shard in audio.iterdir():
        if not any(shard.iterdir()):
            shard.rmdir()
