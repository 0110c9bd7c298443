"""Adapted features from audio to words: what they are made of, saved with the run, applied to speech it never saw."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from runs import run_in_threads
from tones import tones_config

from roundelay.errors import ConfigError
from roundelay.speech import prepare
from roundelay.speech.adaptation import Adaptation, IvectorConfig
from roundelay.speech.config import SpeechConfig, check
from roundelay.speech.evaluation import evaluate_run
from roundelay.speech.feature_set import features
from roundelay.speech.prepare import prepared
from roundelay.speech.recognise import Recogniser, transcribed
from roundelay.training.run_result import RunResult

pytestmark = pytest.mark.usefixtures("tones_cache")
ALL = ("logmel", "fmllr", "ivector")


@pytest.fixture(scope="module")
def config(tones_folder):
    return SpeechConfig(
        corpus="manifest", data=str(tones_folder), features=ALL, ivector=IvectorConfig(dimension=3, components=4)
    )


@pytest.fixture(scope="module")
def run(config, tones_folder, tones_cache, tmp_path_factory):
    """A finished run on all three kinds of features."""
    prepared(config)  # now, since learners wait only a while for each other
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    settings = {"features": list(ALL), "ivector": {"dimension": 3, "components": 4}}
    run_in_threads(tones_config(tones_folder, **settings), folder)
    return folder


def test_adapted_features_stand_beside_those_they_are_made_of(config):
    plain, ready = prepared(replace(config, features=("logmel",))), prepared(config)
    assert ready.features.dimension == 120 + 40 + 3
    assert list(ready.features) == list(plain.features)
    assert np.array_equal(ready.features.frames_NF[:, :120], plain.features.frames_NF)
    assert ready.labels_N[5] == plain.labels_N[5]
    ivectors = {utterance.speaker: ready.features[utterance.id][:, 160:] for utterance in ready.corpus.split("train")}
    assert all((each == each[0]).all() for each in ivectors.values()), "an i-vector is the same in all frames"
    assert len({tuple(each[0].tolist()) for each in ivectors.values()}) == 3, "one for each speaker"


def test_the_papers_dimensions_come_from_raw_audio(config):
    ready = prepared(replace(config, ivector=IvectorConfig(dimension=100, components=4)))
    assert ready.features.dimension == 260


def test_fmllr_features_have_variance_one_over_all_speakers(config):
    ready = prepared(replace(config, features=("fmllr",)))
    rows = np.concatenate([np.arange(*span) for span in ready.spans("train")])
    assert ready.features.dimension == 40
    assert ready.features.frames_NF[rows].astype(float).std(axis=0) == pytest.approx(np.ones(40), abs=0.1)


def test_the_second_time_adapted_features_come_from_the_cache(config, monkeypatch):
    prepared(config)
    monkeypatch.setattr(prepare, "write_features", lambda *_: pytest.fail("computed again"))
    prepared(config)
    with pytest.raises(pytest.fail.Exception):
        prepared(replace(config, features=("fmllr", "ivector")))


def test_held_out_transcripts_are_not_used(config, tones_folder, tmp_path):
    """With other transcripts of the test split the features of the test split are the same."""
    lines = (tones_folder / "manifest.tsv").read_text().splitlines()
    head, *rows = [line.split("\t") for line in lines]
    rows = [[*row[:3], "CC CC CC"] if row[1] == "test" else row for row in rows]
    for each in ("wav", "align", "lexicon"):
        (tmp_path / each).symlink_to(tones_folder / each)
    (tmp_path / "manifest.tsv").write_text("".join("\t".join(row) + "\n" for row in [head, *rows]))
    one, other = prepared(config), prepared(replace(config, data=str(tmp_path)))
    for utterance in one.corpus.split("test"):
        assert np.array_equal(one.features[utterance.id], other.features[utterance.id])


def test_a_saved_adaptation_gives_the_same_features(config, tmp_path):
    ready = prepared(config)
    assert ready.adaptation
    ready.adaptation.save(tmp_path / "saved.npz")
    again = Adaptation.load(tmp_path / "saved.npz")
    base = features(ready.corpus, config.logmel)
    names = [utterance.id for utterance in ready.corpus.split("train") if utterance.speaker == "train-0"]
    labels = ready.training_labels()
    made = again.adapted({n: base[n] for n in names}, {n: labels[n] for n in names}, None)
    assert all(np.array_equal(made[name], ready.features[name]) for name in names)


def test_gaussians_score_the_fmllr_columns_wherever_they_stand(config):
    ready = prepared(config)
    name = ready.corpus.split("test")[0].id
    kinds = ("ivector", "fmllr")
    moved = replace(ready.adaptation, kinds=kinds)
    frames = np.asarray(ready.features[name])
    scores = ready.adaptation.log_likelihoods(frames)
    assert scores.shape == (len(frames), ready.tying.num_states)
    assert np.array_equal(moved.log_likelihoods(np.concatenate([frames[:, 160:], frames[:, 120:160]], axis=1)), scores)
    assert replace(ready.adaptation, model=None).log_likelihoods(frames) is None
    labels_T = ready.labels_N[slice(*ready.features.rows(name))]
    assert (scores.argmax(axis=1) == labels_T).mean() > 0.5, "the right state is mostly the most likely one"


def test_an_adapted_run_evaluates_transcribes_and_aligns(run, tones_folder):
    figures = evaluate_run(run, "test")
    assert figures["wer"] < 0.15
    assert len(figures["wer_by_pass"]) == 2
    assert evaluate_run(run, "test", passes=1)["wer_by_pass"] == figures["wer_by_pass"][:1]
    recogniser = Recogniser.of_run(RunResult.read(run))
    files = sorted((tones_folder / "wav").glob("test*.wav"))[:3]
    found, problems = transcribed(recogniser, files, passes=2)
    together, _ = transcribed(recogniser, files, passes=2, one_speaker=True)
    assert list(found) == list(together) == files
    assert not problems
    assert all(len(hypothesis.words) for hypothesis in together.values())
    times = recogniser.aligned_corpus(prepare.corpus_of(recogniser.config))
    assert len(times.phones) == 36
    assert not times.failed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": ("fmlr",)}, "did you mean 'fmllr'"),
        ({"features": ()}, "each at most once"),
        ({"features": ("logmel", "logmel")}, "each at most once"),
    ],
)
def test_features_that_cannot_be_are_refused(config, changes, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(config, **changes))


def test_features_that_kaldi_adapted_are_not_adapted_again(config, monkeypatch):
    corpus = prepare.corpus_of(config)
    base = features(corpus, config.logmel)
    monkeypatch.setattr(prepare, "corpus", lambda *_, **__: corpus.replace(appended=(object,)))
    monkeypatch.setattr(prepare, "features", lambda *_: base)
    monkeypatch.setattr(prepare, "features_key", lambda *_: "")
    with pytest.raises(ConfigError, match="brings its own fMLLR"):
        prepared(config)
