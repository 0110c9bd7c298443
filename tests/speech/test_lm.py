"""N-gram models: probabilities by hand, sums over all words, ARPA files."""

import math

import pytest
from hypothesis import given, settings, strategies as st

from roundelay.errors import SpeechError
from roundelay.speech.lm import BEGIN, END, NGram
from roundelay.speech.lm_estimation import count_grams, ngram

WORDS = ("A", "B", "C", "D")


def prob(lm, word, *history):
    return 10 ** lm.log10_prob(word, history)


sentences = st.lists(st.lists(st.sampled_from(WORDS[:3]), max_size=6).map(" ".join), max_size=8)


@given(texts=sentences, order=st.integers(1, 4), smoothing=st.sampled_from(["witten-bell", "kneser-ney"]))
@settings(deadline=None, max_examples=40)
def test_every_history_sums_to_one_and_every_word_of_the_lexicon_is_possible(texts, order, smoothing):
    lm = ngram(texts, order, WORDS, smoothing)
    histories = {gram for grams in lm.grams for gram in grams if END not in gram} | {(), (BEGIN,), ("D", "D")}
    for history in histories:
        probs = [prob(lm, word, *history) for word in (*WORDS, END)]
        assert sum(probs) == pytest.approx(1, abs=1e-9)
        assert min(probs) > 0


def test_grams_are_counted_with_the_ends_of_sentences():
    ones, twos = count_grams(["A B", "A"], 2)
    assert ones == {(BEGIN,): 2, ("A",): 2, ("B",): 1, (END,): 2}
    assert twos == {(BEGIN, "A"): 2, ("A", "B"): 1, ("B", END): 1, ("A", END): 1}


def test_witten_bell_by_hand():
    lm = ngram(["A B", "A C"], 2, WORDS)
    # Six tokens of four kinds, five words to predict: p(A) = (2 + 4/5) / (6 + 4).
    assert prob(lm, "A") == pytest.approx(2.8 / 10)
    assert prob(lm, "D") == pytest.approx(0.8 / 10)
    assert prob(lm, "A", BEGIN) == pytest.approx((2 + 1 * 0.28) / (2 + 1))
    assert prob(lm, "B", "A") == pytest.approx((1 + 2 * 0.18) / (2 + 2))
    assert prob(lm, "D", "A") == pytest.approx(2 * 0.08 / (2 + 2))


def test_kneser_ney_by_hand():
    lm = ngram(["A B", "A C", "D B"], 2, WORDS, "kneser-ney")
    # Left neighbours: A 1, B 2, C 1, D 1, </s> 2: n1 = 3, n2 = 2, so Y = 3/7, D1 = 1 − 2·Y·2/3; D2 is capped at 1.9.
    d1, d2 = 3 / 7, 1.9
    gamma = (3 * d1 + 2 * d2) / 7
    p_b, p_d = (2 - d2) / 7 + gamma / 5, (1 - d1) / 7 + gamma / 5
    assert prob(lm, "B") == pytest.approx(p_b)
    assert prob(lm, "D") == pytest.approx(p_d)
    # Bigrams: n1 = 5, n2 = 2, so D1 = 1 − 2·(5/9)·(2/5); A was followed by B and by C, once each.
    d1 = 5 / 9
    assert prob(lm, "B", "A") == pytest.approx((1 - d1) / 2 + 2 * d1 / 2 * p_b)
    assert prob(lm, "D", "A") == pytest.approx(2 * d1 / 2 * p_d)


def test_kneser_ney_trusts_words_that_follow_many_words_and_witten_bell_those_that_are_frequent():
    texts = ["SAN FRANCISCO"] * 20 + ["A B", "C B", "D B"]
    words = ["SAN", "FRANCISCO", *WORDS]
    kneser_ney, witten_bell = (ngram(texts, 2, words, s) for s in ("kneser-ney", "witten-bell"))
    assert prob(kneser_ney, "B", "D", "A") > prob(kneser_ney, "FRANCISCO", "D", "A")
    assert prob(witten_bell, "B", "B") < prob(witten_bell, "FRANCISCO", "B")


def test_perplexity_of_a_uniform_model_is_its_number_of_choices():
    result = ngram([], 1, WORDS).perplexity(["A B", "X C"])
    assert result.perplexity == pytest.approx(5)
    assert (result.tokens, result.unknown) == (5, 1)


def test_perplexity_is_the_geometric_mean_of_inverse_probabilities():
    lm = ngram(["A B", "A C"], 2, WORDS)
    expected = (prob(lm, "A", BEGIN) * prob(lm, "D", "A") * prob(lm, END, "D")) ** (-1 / 3)
    assert lm.perplexity(["A D"]).perplexity == pytest.approx(expected)


@pytest.mark.parametrize("smoothing", ["witten-bell", "kneser-ney"])
def test_arpa_files_read_back_as_they_were(tmp_path, smoothing):
    lm = ngram(["A B C", "A C", "B"], 3, WORDS, smoothing)
    lm.write(tmp_path / "lm.arpa")
    again = NGram.read(tmp_path / "lm.arpa")
    assert again.vocabulary == WORDS
    assert [list(grams) for grams in again.grams] == [sorted(grams) for grams in lm.grams]
    for history in [(), (BEGIN,), ("A", "B"), ("D", "A")]:
        assert again.log10_prob("C", history) == pytest.approx(lm.log10_prob("C", history), abs=1e-6)


def test_kaldilm_accepts_the_file(tmp_path, capfd):
    kaldilm = pytest.importorskip("kaldilm")
    ngram(["A B C", "A C", "B"], 3, WORDS).write(tmp_path / "lm.arpa")
    symbols = ["<eps>", *WORDS, "#0", BEGIN, END]
    (tmp_path / "words.txt").write_text("".join(f"{word} {i}\n" for i, word in enumerate(symbols)))
    text = kaldilm.arpa2fst(
        str(tmp_path / "lm.arpa"), disambig_symbol="#0", read_symbol_table=str(tmp_path / "words.txt")
    )
    assert "[W]" not in capfd.readouterr().err
    assert len(text.splitlines()) > 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "not an ARPA file"),
        ("\\data\\\n\\1-grams:\nx A", "lm.arpa:3: expected"),
        ("\\data\\\n\\1-grams:\n-1 A 0 0 0", "lm.arpa:3: a 1-gram has 1 words"),
    ],
)
def test_a_file_that_is_not_arpa_is_refused_with_the_line(tmp_path, text, says):
    (tmp_path / "lm.arpa").write_text(text)
    with pytest.raises(SpeechError, match=says):
        NGram.read(tmp_path / "lm.arpa")


def test_a_comment_may_describe_the_sections_that_follow(tmp_path):
    comment = "Beginning of data mark: \\data\\\n\\1-grams:\np_1 wd_1 bo_wt_1\n\n"
    text = comment + "\\data\\\nngram 1=1\n\n\\1-grams:\n-0.3\tA\t0.0\n\n\\end\\\n"
    (tmp_path / "lm.arpa").write_text(text)
    assert NGram.read(tmp_path / "lm.arpa").vocabulary == ("A",)


def test_words_outside_the_vocabulary_are_refused():
    with pytest.raises(SpeechError, match="'X'"):
        ngram(["A X"], 2, WORDS)
    with pytest.raises(SpeechError, match="'X' is not in"):
        ngram(["A"], 2, WORDS).log10_prob("X")
    with pytest.raises(SpeechError, match="did you mean 'kneser-ney'"):
        ngram(["A"], 2, WORDS, "kneser-nay")


def test_the_begin_of_a_sentence_is_never_predicted():
    assert math.isclose(ngram(["A"], 2, WORDS).grams[0][(BEGIN,)].log10_prob, -99)
