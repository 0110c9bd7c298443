"""AN4: census data read out and spelled by 74 speakers of CMU's alphanumeric corpus, about 50 minutes.

The archive is a manifest folder with machine-made phone and word times, the corpus's lexicon and our own split by
speakers (its README says how it was made). The original recordings: http://www.speech.cs.cmu.edu/databases/an4/
"""

from __future__ import annotations

from pathlib import Path

from roundelay.speech.cache import find_corpus
from roundelay.speech.corpora.manifest import manifest
from roundelay.speech.corpus import Corpus


def an4(data: Path | None = None) -> Corpus:
    """AN4 from its folder or archive, or from where ROUNDELAY_DATA points."""
    corpus = manifest(find_corpus("an4", data), "an4")
    return corpus.replace(description="AN4: dates, addresses, numbers and spelled words, 16 kHz, phones of CMUdict")
