"""Recognition, alignment and flat start on AN4, with one Gaussian per state."""

import os

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from roundelay.errors import DataError
from roundelay.speech.align import Aligner, Transcripts, aligned
from roundelay.speech.corpora.an4 import an4
from roundelay.speech.decode import Decoder, Scales, decode_all
from roundelay.speech.feature_set import features
from roundelay.speech.flat_start import flat_start
from roundelay.speech.gaussians import Gaussians, Labelled, Statistics
from roundelay.speech.graph import decoding_graph
from roundelay.speech.hmm import Monophones, frame_labels, self_loops
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm_estimation import ngram
from roundelay.speech.projection import discriminant_axes, mean_and_covariance
from roundelay.speech.score import score
from roundelay.speech.tree import relabelled
from roundelay.speech.tree_growing import ContextStatistics, decision_tree
from roundelay.speech.word_times import word_times

pytestmark = pytest.mark.slow


class An4:
    """AN4 with its features in the 40 directions that tell monophone states apart."""

    def __init__(self):
        self.corpus = an4()
        self.features = features(self.corpus)
        self.lexicon = Lexicon.read(self.corpus.lexicon)
        self.tying = Monophones(self.lexicon.phones)
        self.lm = ngram([u.text for u in self.corpus.split("train")], 2, self.lexicon.words)
        train = [u for u in self.corpus.split("train") if u.phones]
        self.labels = {u.id: frame_labels(u.phones, len(self.features[u.id]), self.tying) for u in train}
        _, covariance = mean_and_covariance(self.features[name] for name in self.labels)
        seen = Statistics.of(Labelled(self.features, self.labels), self.tying.num_states)
        self.axes = discriminant_axes(covariance, seen, 40)

    def frames(self, name):
        return (np.asarray(self.features[name], np.float64) @ self.axes).astype(np.float32)

    def trained(self, labels, tying):
        pairs = ((self.frames(name), labels_T) for name, labels_T in labels.items())
        gaussians = Gaussians.fit(Statistics.of(pairs, tying.num_states))
        return gaussians, self_loops(labels.values(), tying.num_states)

    def recognised(self, labels, tying, split="valid"):
        gaussians, loops = self.trained(labels, tying)
        decoder = Decoder(decoding_graph(self.lexicon, self.lm, tying), loops, Scales(acoustic=0.1))
        scores = {u.id: gaussians.log_likelihoods(self.frames(u.id)) for u in self.corpus.split(split)}
        return decode_all(decoder, scores)

    def wer(self, labels, tying):
        heard = {name: hypothesis.words for name, hypothesis in self.recognised(labels, tying).items()}
        return score({u.id: u.text for u in self.corpus.split("valid")}, heard).wer


@pytest.fixture(scope="module")
def speech():
    if not os.environ.get("ROUNDELAY_DATA"):
        pytest.skip("ROUNDELAY_DATA does not say where AN4 is")
    try:
        return An4()
    except DataError as error:
        pytest.skip(f"no AN4: {error}")


def test_triphones_recognise_an4_better_than_monophones_and_both_well_for_one_gaussian_per_state(speech):
    monophones = speech.wer(speech.labels, speech.tying)
    seen = ContextStatistics.of(map(speech.frames, speech.labels), speech.labels.values(), speech.tying)
    tree = decision_tree(seen, 400, min_count=50)
    triphones = speech.wer(
        {name: relabelled(labels, speech.tying, tree) for name, labels in speech.labels.items()}, tree
    )
    assert monophones < 0.32
    assert triphones < monophones - 0.03


def test_correct_words_have_the_right_times(speech):
    found = speech.recognised(speech.labels, speech.tying)
    offs = []
    for utterance in speech.corpus.split("valid"):
        times = word_times(found[utterance.id], speech.lexicon, speech.tying)
        if utterance.words and times.symbols == utterance.words.symbols:
            offs += np.abs(np.subtract(times.starts_s, utterance.words.starts_s)).tolist()
    assert len(offs) > 50
    assert np.median(offs) < 0.04


def test_realignment_agrees_with_the_times_of_the_corpus(speech):
    gaussians, loops = speech.trained(speech.labels, speech.tying)
    texts = {u.id: u.text for u in speech.corpus.split("train")[:200]}
    frames = {name: speech.frames(name) for name in texts}
    transcripts = Transcripts(texts, speech.lexicon, speech.tying)
    found = aligned(Aligner(gaussians.log_likelihoods, loops), frames, transcripts)
    phone = speech.tying.phone_of_state
    agree = [np.mean(phone[found.labels[n]] == phone[y]) for n, y in speech.labels.items() if n in found.labels]
    assert len(found.failed) < 5
    assert np.mean(agree) > 0.85


@pytest.mark.timeout(900)  # half a minute of one core, but the machine may be busy
def test_a_flat_start_needs_no_alignments(speech):
    texts = {u.id: u.text for u in speech.corpus.split("train")}
    start = flat_start(speech.features, Transcripts(texts, speech.lexicon, speech.tying))
    phone = speech.tying.phone_of_state
    agree = [np.mean(phone[start.alignments.labels[name]] == phone[labels]) for name, labels in speech.labels.items()]
    # 0.85 of all frames. The given times come from an aligner too: even Gaussians trained on them agree only a little more
    # (test above).
    assert np.mean(agree) > 0.83
    assert speech.wer(start.alignments.labels, speech.tying) < speech.wer(speech.labels, speech.tying) + 0.05
