"""Word error rates, their intervals, and their files."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

pytest.importorskip("kaldialign")

from roundelay.errors import SpeechError
from roundelay.speech.score import difference, score
from roundelay.speech.score_files import read_recogs, write_scores

words = st.lists(st.sampled_from("abc"), max_size=7)


def levenshtein(x, y):
    """Wagner and Fischer's table, as an independent count of errors."""
    row = list(range(len(y) + 1))
    for i, a in enumerate(x, start=1):
        previous, row = row, [i]
        for j, b in enumerate(y, start=1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (a != b)))
    return row[-1]


@given(pairs=st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_errors_are_the_fewest_edits_and_their_kinds_explain_the_lengths(pairs):
    references = {str(i): said for i, (said, _) in enumerate(pairs)}
    result = score(references, {str(i): heard for i, (_, heard) in enumerate(pairs)})
    assert result.errors == sum(levenshtein(*pair) for pair in pairs)
    assert result.errors == result.insertions + result.deletions + result.substitutions
    assert result.insertions - result.deletions == sum(len(heard) - len(said) for said, heard in pairs)
    assert result.words == sum(len(said) for said, _ in pairs)


def test_an_utterance_without_hypothesis_counts_as_deletions():
    result = score({"u1": "a b", "u2": "c"}, {"u1": "a b"})
    assert (result.deletions, result.wer, result.sentence_error) == (1, pytest.approx(1 / 3), 0.5)


def test_hypotheses_without_reference_are_refused():
    with pytest.raises(SpeechError, match="'u9'"):
        score({"u1": "a"}, {"u9": "a"})


def systems(utterances=400, rates=(0.2, 0.1)):
    """Two systems that spoil each of ten words with known probability."""
    rng = np.random.default_rng(0)
    said = {f"u{i:03d}": ["a"] * 10 for i in range(utterances)}
    return [score(said, {name: np.where(rng.random(10) < rate, "x", "a").tolist() for name in said}) for rate in rates]


def test_the_interval_is_that_of_the_normal_approximation_for_independent_errors():
    first, _ = systems()
    low, high = first.ci95()
    half = 1.96 * np.sqrt(first.wer * (1 - first.wer) / first.words)
    assert low == pytest.approx(first.wer - half, abs=0.1 * half)
    assert high == pytest.approx(first.wer + half, abs=0.1 * half)


def test_intervals_repeat_with_the_seed():
    said = {f"u{i}": ["a"] * (i + 1) for i in range(50)}
    first = score(said, {name: ["x", *words[1:]] for name, words in said.items()})
    assert first.ci95(seed=1) == first.ci95(seed=1) != first.ci95(seed=2)


def test_a_better_system_is_better_beyond_doubt_and_an_equal_one_is_a_coin_toss():
    first, second = systems()
    gain = difference(first, second)
    assert gain.wer == pytest.approx(second.wer - first.wer)
    assert gain.ci95.low < gain.wer < gain.ci95.high < 0
    assert gain.p_better == 1
    assert difference(first, first).p_better == 0.5


def test_pairing_sharpens_the_comparison_of_systems_that_fail_on_the_same_utterances():
    rng = np.random.default_rng(1)
    said = {f"u{i:03d}": ["a"] * 10 for i in range(200)}
    hard = dict(zip(said, rng.random(200) < 0.3, strict=True))
    spoiled = {name: (["x"] * 8 + ["a"] * 2 if hard[name] else ["a"] * 10) for name in said}
    once_better = {name: [*words[:7], "a", *words[8:]] for name, words in spoiled.items()}
    first, second = score(said, spoiled), score(said, once_better)
    gain = difference(first, second)
    assert gain.ci95.high < 0
    assert second.ci95().high > first.ci95().low  # the two intervals alone would not tell them apart


def test_systems_on_different_utterances_cannot_be_compared():
    with pytest.raises(SpeechError, match="references differ"):
        difference(score({"u1": "a"}, {}), score({"u1": "b"}, {}))


def test_an_empty_test_set_does_not_divide_by_zero():
    result = score({}, {})
    assert (result.wer, result.ci95()) == (0, (0, 0))


def test_files_have_the_layout_of_icefall(tmp_path):
    result = score({"u1": "ONE TWO THREE", "u2": "FOUR"}, {"u1": "ONE TOO THREE", "u2": "OH FOUR"})
    recogs, errs = write_scores(tmp_path / "scores", "test-bigram", result)
    assert (recogs.name, errs.name) == ("recogs-test-bigram.txt", "errs-test-bigram.txt")
    assert recogs.read_text().splitlines()[:2] == [
        "u1:\tref=['ONE', 'TWO', 'THREE']",
        "u1:\thyp=['ONE', 'TOO', 'THREE']",
    ]
    text = errs.read_text()
    assert text.startswith("%WER 50.00 [2 / 4, 1 ins, 0 del, 1 sub ]\n")
    for line in (
        "u1:\tONE (TWO->TOO) THREE",
        "u2:\t(*->OH) FOUR",
        "1   TWO -> TOO",
        "1   OH",
        "ONE   1 0",
        "TWO   0 1",
    ):
        assert line in text.splitlines()


def test_transcripts_are_read_back_as_the_score_that_was_written(tmp_path):
    result = score({"u:\t1": 'O\'CLOCK "TWO" Ü', "u2": "FOUR", "u3": ""}, {"u:\t1": "TOO", "u2": "OH FOUR"})
    recogs, _ = write_scores(tmp_path, "test", result)
    assert read_recogs(recogs) == result


def test_a_line_that_is_not_a_transcript_is_named(tmp_path):
    path = tmp_path / "recogs-test.txt"
    path.write_text("u1:\tref=['A']\nu1:\thyp=['A'\n")
    with pytest.raises(SpeechError, match=r"recogs-test.txt:2 is not a line"):
        read_recogs(path)


def test_figures_have_the_names_that_commands_print():
    figures = score({"u1": "a b"}, {"u1": "a"}).to_json()
    assert set(figures) == {"wer", "words", "insertions", "deletions", "substitutions", "sentence_error", "ci95"}
    assert figures["ci95"] == [0.5, 0.5]
