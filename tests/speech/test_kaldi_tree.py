"""Kaldi's trees against an independent walk through the same tree, and a run on the states of a tree."""

import itertools
import struct

import kaldiio
import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from runs import run_in_threads
from tones import WORDS, tones_config

from roundelay.errors import ConfigError, DataError, SpeechError
from roundelay.speech.audio import utterance_audio
from roundelay.speech.config import SpeechConfig, check
from roundelay.speech.corpora.manifest import manifest
from roundelay.speech.evaluation import evaluate_run
from roundelay.speech.features import log_mel
from roundelay.speech.hmm import Monophones, frame_labels
from roundelay.speech.kaldi_tree import read_tree
from roundelay.speech.prepare import prepared
from roundelay.speech.segments import read_ctm
from roundelay.speech.tree import tying_from_json

PHONES = {"<eps>": 0, "SIL": 1, "A_B": 2, "A_E": 3, "B_B": 4, "#0": 5}
# A tree as Kaldi's recipes make it: silence has five states and no context; the two variants of A share a root, with questions
# about positions in the middle; B has a table.
SILENCE = ("TE", -1, [("CE", pdf) for pdf in range(5)])
A = (
    "SE",
    0,
    [1, 4],
    ("SE", -1, [0], ("CE", 5), ("CE", 6)),
    ("SE", -1, [0, 1], ("CE", 7), ("SE", 2, [2, 3], ("CE", 8), ("CE", 9))),
)
B = ("TE", -1, [("CE", 10), ("TE", 2, [None, ("CE", 11), ("CE", 12), ("CE", 12), ("CE", 12)]), ("CE", 13)])
ROOT = ("SE", 1, [1], SILENCE, ("TE", 1, [None, None, A, A, B]))


def answer(tree, event):
    """Kaldi's own definition of an event map."""
    if tree is None or tree[0] == "CE":
        return tree and tree[1]
    kind, key, given = tree[:3]
    if kind == "SE":
        return answer(tree[3] if event[key] in given else tree[4], event)
    return answer(given[event[key]] if event[key] < len(given) else None, event)


def as_text(tree):
    if tree is None:
        return "NULL "
    kind, *rest = tree
    if kind == "CE":
        return f"CE {rest[0]}\n"
    if kind == "SE":
        return f"SE {rest[0]} [ {' '.join(map(str, rest[1]))} ]\n{{ {as_text(rest[2])}{as_text(rest[3])}}} \n"
    return f"TE {rest[0]} {len(rest[1])} ( {''.join(map(as_text, rest[1]))}) \n"


def as_binary(tree):
    def integer(value, signed=4):
        return struct.pack("<bi", signed, value)

    if tree is None:
        return b"NULL "
    kind, *rest = tree
    if kind == "CE":
        return b"CE " + integer(rest[0])
    if kind == "SE":
        values = struct.pack(f"<bi{len(rest[1])}i", 4, len(rest[1]), *rest[1])
        return b"SE " + integer(rest[0]) + values + b"{ " + as_binary(rest[2]) + as_binary(rest[3]) + b"} "
    return b"TE " + integer(rest[0]) + integer(len(rest[1]), -4) + b"( " + b"".join(map(as_binary, rest[1])) + b") "


def write_text(folder, root=ROOT, window="3 1", phones=PHONES):
    (folder / "tree").write_text(f"ContextDependency {window} ToPdf {as_text(root)}EndContextDependency ")
    (folder / "phones.txt").write_text("".join(f"{name} {number}\n" for name, number in phones.items()))
    return folder / "tree", folder / "phones.txt"


def write_binary(folder):
    _, phones = write_text(folder)
    window = struct.pack("<bibi", 4, 3, 4, 1)
    content = b"\0BContextDependency " + window + b"ToPdf " + as_binary(ROOT) + b"EndContextDependency "
    (folder / "tree").write_bytes(content)
    return folder / "tree", phones


@pytest.mark.parametrize("write", [write_text, write_binary])
def test_every_triphone_has_the_pdfs_that_kaldi_gives_it(tmp_path, write):
    tying, merged = read_tree(*write(tmp_path), "SIL")
    assert tying.phones == ("SIL", "A_B", "A_E", "B_B")
    assert tying.num_states == 14
    for left, phone, right in itertools.product(range(4), repeat=3):
        # Of the five states of silence we use the first, the middle and the last.
        positions = (0, 2, 4) if phone == 0 else (0, 1, 2)
        event = {0: PHONES[tying.phones[left]], 1: PHONES[tying.phones[phone]], 2: PHONES[tying.phones[right]]}
        expected = [answer(ROOT, event | {-1: position}) for position in positions]
        assert tying.chains(left, phone, right).tolist() == expected
    assert merged == {1: 2, 3: 2}


def test_variants_that_share_states_are_known_by_the_first_of_them(tmp_path):
    tying, _ = read_tree(*write_text(tmp_path), "SIL")
    assert [tying.phones[phone] for phone in tying.phone_of_state[5:10]] == ["A_B"] * 5
    again = tying_from_json(tying.to_json())
    assert np.array_equal(again.chains(1, 2, 3), tying.chains(1, 2, 3))


@pytest.mark.parametrize(
    ("root", "window", "silence", "said"),
    [
        (ROOT, "5 2", "SIL", "windows of 5 phones"),
        (ROOT, "3 1", "sil", "no silence phone 'sil'"),
        (("TE", -1, [("CE", 0), ("CE", 1)]), "3 1", "SIL", "has 2 states"),
    ],
)
def test_trees_that_cannot_be_used_are_refused(tmp_path, root, window, silence, said):
    with pytest.raises(SpeechError, match=said):
        read_tree(*write_text(tmp_path, root, window), silence)


@pytest.mark.parametrize(
    "text", ["", "ContextDependency 3 1 ToPdf CE", "ContextDependency 3 1 ToPdf XE 1", "\0Bno tree"]
)
def test_a_file_that_is_not_a_tree_is_refused(tmp_path, text):
    _, phones = write_text(tmp_path)
    (tmp_path / "tree").write_text(text)
    with pytest.raises(DataError, match="is not a decision tree of Kaldi"):
        read_tree(tmp_path / "tree", phones, "SIL")
    with pytest.raises(DataError, match="is not a table of phones"):
        read_tree(*write_text(tmp_path)[:1], tmp_path / "gone", "SIL")


@pytest.fixture(scope="module")
def kaldi_folder(tones_folder, tmp_path_factory):
    """The corpus of tones as Kaldi has it, with the alignments of a monophone tree and word-position variants of phones."""
    folder = tmp_path_factory.mktemp("kaldi")
    corpus, tying = manifest(tones_folder), Monophones(("SIL", "A", "B", "C"))
    for split in corpus.splits:
        (folder / split).mkdir()
        spoken = corpus.split(split)
        for name, line in {"wav.scp": "{0.audio}", "text": "{0.text}", "utt2spk": "{0.speaker}"}.items():
            (folder / split / name).write_text("".join(f"{each.id} {line.format(each)}\n" for each in spoken))
        frames = {each.id: len(log_mel(utterance_audio(each).samples, 16000)) for each in spoken}
        pdfs = {each.id: frame_labels(each.phones, frames[each.id], tying) for each in spoken}
        kaldiio.save_ark(str(folder / split / "pdf.ark"), pdfs, scp=str(folder / split / "pdf.scp"))
    names = ["SIL", *(f"{phone}_{place}" for phone in "ABC" for place in "BIE")]
    roots = [None, *(("TE", -1, [("CE", 3 * phone + k) for k in range(3)]) for phone in (0, *np.repeat([1, 2, 3], 3)))]
    write_text(folder, ("TE", 1, roots), phones={name: number for number, name in enumerate(["<eps>", *names])})
    (folder / "lexicon.txt").write_text("".join(f"{word} {_marked(phones)}\n" for word, phones in WORDS.items()))
    return folder


def _marked(phones):
    first, *middle, last = phones.split()
    return " ".join([f"{first}_B", *(f"{phone}_I" for phone in middle), f"{last}_E"])


@pytest.mark.usefixtures("tones_cache")
class TestARunOnKaldisStates:
    def test_labels_are_the_pdfs(self, kaldi_folder):
        ready = prepared(SpeechConfig(corpus="kaldi", data=str(kaldi_folder), labels="pdfs"))
        assert ready.tying.num_states == 12
        for id in ("train000", "test003"):
            first, last = ready.features.rows(id)
            assert ready.labels_N[first:last].tolist() == ready.corpus.pdfs[id].tolist()
        assert len(ready.spans("train")) == 24

    def test_it_is_decoded_with_the_tree_and_words_get_their_times(self, kaldi_folder, tmp_path):
        config = tones_config(kaldi_folder, corpus="kaldi", labels="pdfs")
        run_in_threads(config, tmp_path / "run")
        assert evaluate_run(tmp_path / "run", "test")["wer"] < 0.15
        durations = [row[2] for times in read_ctm(tmp_path / "run" / "words-test.ctm").values() for row in times]
        assert min(durations) > 0.05

    def test_states_that_do_not_fit_are_no_labels(self, kaldi_folder):
        path = kaldi_folder / "valid" / "pdf.ark"
        scp = kaldi_folder / "valid" / "pdf.scp"
        kept = scp.read_text(), path.read_bytes()
        pdfs = dict(kaldiio.load_scp(str(scp)))
        pdfs["valid000"] = pdfs["valid000"][::3]
        pdfs["valid001"] = pdfs["valid001"] + 12
        kaldiio.save_ark(str(path), pdfs, scp=str(scp))
        try:
            ready = prepared(SpeechConfig(corpus="kaldi", data=str(kaldi_folder), labels="pdfs"))
            assert len(ready.spans("valid")) == 4
        finally:
            scp.write_text(kept[0])
            path.write_bytes(kept[1])

    def test_without_a_tree_it_says_what_is_missing(self, kaldi_folder):
        (kaldi_folder / "tree").rename(kaldi_folder / "tree.away")
        config = SpeechConfig(corpus="kaldi", data=str(kaldi_folder), labels="pdfs")
        try:
            with pytest.raises(DataError, match="has no tree"):
                prepared(config)
        finally:
            (kaldi_folder / "tree.away").rename(kaldi_folder / "tree")

    def test_the_number_of_states_is_the_trees(self, kaldi_folder):
        with pytest.raises(ConfigError, match="must be 0"):
            check(SpeechConfig(corpus="kaldi", data=str(kaldi_folder), labels="pdfs", states=100))
