"""N-gram language models in the ARPA format. `lm_estimation` makes them from sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from roundelay.errors import SpeechError
from roundelay.speech.text_files import lines_of

BEGIN, END = "<s>", "</s>"

Gram = tuple[str, ...]


class Scored(NamedTuple):
    """log10 p(w|h) of an n-gram, and log10 of its backoff weight when the n-gram is itself a history."""

    log10_prob: float
    log10_backoff: float = 0.0


class Perplexity(NamedTuple):
    """exp of the mean negative log probability per token. Tokens are known words and ends of sentences."""

    perplexity: float
    tokens: int
    unknown: int


@dataclass(frozen=True)
class NGram:
    """An n-gram model: p(w|h) is in `grams`, or it is backoff(h)·p(w|h'), where h' is h without its oldest word."""

    grams: tuple[dict[Gram, Scored], ...]  # grams[k]: those of k + 1 words

    @property
    def order(self) -> int:
        """Words of the longest n-grams."""
        return len(self.grams)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All words that can be predicted, except the end of a sentence; sorted."""
        return tuple(sorted(word for (word,) in self.grams[0] if word not in {BEGIN, END}))

    def log10_prob(self, word: str, history: Sequence[str] = ()) -> float:
        """log10 p(word | history). Raises SpeechError for a word outside the vocabulary."""
        h = tuple(history)[max(0, len(history) - self.order + 1) :]
        backoff = 0.0
        while (*h, word) not in self.grams[len(h)]:
            if not h:
                raise SpeechError(f"'{word}' is not in the language model's vocabulary of {len(self.vocabulary)} words")
            backoff += self.grams[len(h) - 1].get(h, Scored(0.0)).log10_backoff
            h = h[1:]
        return backoff + self.grams[len(h)][(*h, word)].log10_prob

    def perplexity(self, texts: Iterable[str]) -> Perplexity:
        """Perplexity of sentences. Unknown words are skipped and counted."""
        total, tokens, unknown_words = 0.0, 0, 0
        for text in texts:
            history: Gram = (BEGIN,)
            for word in (*text.split(), END):
                if (word,) in self.grams[0]:
                    total += self.log10_prob(word, history)
                    tokens += 1
                else:
                    unknown_words += 1
                history = (*history, word)
        return Perplexity(10 ** (-total / max(tokens, 1)), tokens, unknown_words)

    def write(self, path: str | Path) -> None:
        """Write the model as an ARPA file."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.write("\\data\\\n")
            file.writelines(f"ngram {k}={len(grams)}\n" for k, grams in enumerate(self.grams, start=1))
            for k, grams in enumerate(self.grams, start=1):
                file.write(f"\n\\{k}-grams:\n")
                file.writelines(_arpa_line(gram, scored, self.order) for gram, scored in sorted(grams.items()))
            file.write("\n\\end\\\n")

    @classmethod
    def read(cls, path: str | Path) -> NGram:
        r"""Read an ARPA file. Everything before its \data\ line is a comment."""
        grams: list[dict[Gram, Scored]] = []
        started = False
        for number, line in enumerate(lines_of(path), start=1):
            text = line.strip()
            if not started:
                started = text == "\\data\\"
            elif text.endswith("-grams:"):
                grams.append({})
            elif text == "\\end\\":
                break
            elif grams and text:
                gram, scored = _parsed(text.split(), len(grams), f"{path}:{number}")
                grams[-1][gram] = scored
        if not grams or not grams[0]:
            raise SpeechError(f"{path} is not an ARPA file: it has no \\data\\ with \\1-grams: below")
        return cls(tuple(grams))


def _arpa_line(gram: Gram, scored: Scored, order: int) -> str:
    backoff = f"\t{scored.log10_backoff:.7f}" if len(gram) < order and gram[-1] != END else ""
    return f"{scored.log10_prob:.7f}\t{' '.join(gram)}{backoff}\n"


def _parsed(fields: list[str], order: int, where: str) -> tuple[Gram, Scored]:
    try:
        scores = [float(fields[0]), *map(float, fields[order + 1 :])]
        log10_prob, log10_backoff = (*scores, 0.0)[:2]
    except (ValueError, IndexError):
        raise SpeechError(
            f"{where}: expected 'log10_prob word×{order} [log10_backoff]', got '{' '.join(fields)}'"
        ) from None
    if len(fields) not in {order + 1, order + 2}:
        raise SpeechError(f"{where}: a {order}-gram has {order} words, got '{' '.join(fields)}'")
    return tuple(fields[1 : order + 1]), Scored(log10_prob, log10_backoff)
