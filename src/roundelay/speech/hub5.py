"""Scores of Hub5-2000 by NIST's own program, separately for Switchboard and CallHome.

`hubscr.pl` of SCTK applies the global mapping file (.glm) to reference (.stm) and hypothesis (.ctm) and aligns them with sclite.
Debian's package `sctk` contains this program; PyPI's package of the same name does not. The source is at NIST.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from roundelay.errors import SpeechError
from roundelay.speech.segments import Segments

_DEBIAN = Path("/usr/lib/sctk/bin/hubscr.pl")
PARTS = {"switchboard": "sw", "callhome": "en"}  # prefixes of the names of conversations
# | speaker | sentences words | correct substitutions deletions insertions errors sentence errors |
_ROW = re.compile(r"\|\s*(\S+)\s*\|\s*\d+\s+(\d+)\s*\|\s*(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+\d+\s+\d+\s*\|")


class Turn(NamedTuple):
    """Recognised words of one side of a conversation. Word times are relative to `start_s`."""

    recording: str
    channel: str
    start_s: float
    words: Segments


@dataclass(frozen=True)
class Hub5Score:
    """Error counts of one part of the test set."""

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def wer(self) -> float:
        """Word error rate as a fraction."""
        return (self.substitutions + self.deletions + self.insertions) / max(self.words, 1)

    def __add__(self, other: Hub5Score) -> Hub5Score:
        return Hub5Score(
            self.words + other.words,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )


def hubscr() -> Path:
    """Path of the program hubscr.pl. Raises SpeechError if it is not installed."""
    found = shutil.which("hubscr.pl")
    if found:
        return Path(found)
    if _DEBIAN.exists():
        return _DEBIAN
    raise SpeechError(
        "Hub5 scoring needs NIST's hubscr.pl; install Debian's package 'sctk', or put SCTK's programs on the PATH"
    )


def hub5(turns: Iterable[Turn], stm: str | Path, glm: str | Path, folder: str | Path) -> dict[str, Hub5Score]:
    """Scores of `switchboard`, `callhome` and `all`. The files and reports of NIST's program stay in `folder`."""
    program = hubscr().resolve()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reference.stm").write_text(scorable(Path(stm).read_text(encoding="latin-1")), encoding="latin-1")
    shutil.copyfile(glm, folder / "mapping.glm")
    write_hub5_ctm(folder / "hypothesis.ctm", turns)
    command = ["perl", str(program), "-p", str(program.parent), "-V", "-l", "english", "-h", "hub5"]
    command += ["-g", "mapping.glm", "-r", "reference.stm", "hypothesis.ctm"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = folder / "hypothesis.ctm.filt.raw"
    if ran.returncode != 0 or not report.exists():
        said = (ran.stdout + ran.stderr).strip().splitlines()[-3:]
        raise SpeechError(f"{program.name} failed with {ran.returncode}: {' / '.join(said)}; its files are in {folder}")
    return by_part(report.read_text(encoding="utf-8", errors="replace"))


def scorable(stm: str) -> str:
    """The content of an stm file of the LDC without what hubscr.pl cannot read: doubled parentheses, and <b_aside> marks.

    >>> scorable("en_4156 A en_4156_A 1.0 2.0 <O,en,F,en-F> ((uh) <B_ASIDE> yes <E_ASIDE> right")
    'en_4156 A en_4156_A 1.0 2.0 <O,en,F,en-F> (uh)  yes  right'
    """
    return re.sub(r"<[be]_aside>", "", stm.replace("((", "(").replace("))", ")"), flags=re.IGNORECASE)


def write_hub5_ctm(path: str | Path, turns: Iterable[Turn]) -> None:
    """Write all words with their times in the conversation, sorted as NIST's program needs them."""
    rows = sorted(
        (turn.recording, turn.channel, turn.start_s + start, duration, word)
        for turn in turns
        for word, start, duration in turn.words
    )
    lines = [
        f"{recording} {channel} {start:.2f} {duration:.2f} {word}\n"
        for recording, channel, start, duration, word in rows
    ]
    Path(path).write_text("".join(lines), encoding="utf-8")


def by_part(raw_report: str) -> dict[str, Hub5Score]:
    """Counts in sclite's raw report, summed over the speakers of each part."""
    scores = {"switchboard": Hub5Score(), "callhome": Hub5Score(), "all": Hub5Score()}
    for speaker, words, _, substitutions, deletions, insertions in _ROW.findall(raw_report):
        if speaker.startswith("Sum"):
            continue
        row = Hub5Score(int(words), int(substitutions), int(deletions), int(insertions))
        scores["all"] += row
        for part, prefix in PARTS.items():
            if speaker.lower().startswith(prefix):
                scores[part] += row
    if not scores["all"].words:
        raise SpeechError("sclite's raw report has no speaker with words; check that the reference is not empty")
    return scores
