"""Decision trees against brute force on the frames themselves."""

import itertools
import json

import numpy as np
import pytest

from roundelay.errors import SpeechError
from roundelay.speech.hmm import Monophones, Occurrences, phones_in, state_labels
from roundelay.speech.tree import relabelled, tying_from_json
from roundelay.speech.tree_growing import (
    ContextStatistics,
    _Grower,
    decision_tree,
    log_likelihood,
    questions_from,
)

TYING = Monophones(("SIL", "A", "E", "M", "N", "T"), states_per_phone=2)
NASALS, VOWELS = {3, 4}, {1, 2}


def speech(utterances=60, seed=0):
    """Frames in which vowels begin high after nasals, and nothing else depends on context; M is like N, A is like E."""
    rng = np.random.default_rng(seed)
    base = np.array([[0, 0], [5, 5], [5, 5.3], [-5, 5], [-5, 5.3], [5, -5]], dtype=float)
    frames, labels = [], []
    for _ in range(utterances):
        phones = np.concatenate([[0], rng.integers(1, 6, 12), [0]])
        starts = np.arange(len(phones)) * 6
        found = Occurrences(phones.astype(np.int32), starts.astype(np.int32), 6 * len(phones))
        label = state_labels(found, TYING)
        mean = np.repeat(base[phones], 6, axis=0)
        left = np.repeat(found.neighbours[0], 6)
        shifted = np.isin(np.repeat(phones, 6), list(VOWELS)) & np.isin(left, list(NASALS)) & (label % 2 == 0)
        mean[shifted, 0] += 4
        frames.append(mean + rng.standard_normal(mean.shape))
        labels.append(label)
    return frames, labels


FRAMES, LABELS = speech()
SEEN = ContextStatistics.of(FRAMES, LABELS, TYING)


def fitted(x):
    """log likelihood of frames under the Gaussian fitted to them, the long way."""
    if not len(x):
        return 0.0
    mean, variance = x.mean(axis=0), x.var(axis=0)
    return float((-0.5 * (np.log(2 * np.pi * variance) + (x - mean) ** 2 / variance)).sum())


def frames_by_context():
    table = {}
    for frames, labels in zip(FRAMES, LABELS, strict=True):
        found = phones_in(labels, TYING)
        left, right = (np.repeat(side, found.durations) for side in found.neighbours)
        for frame, a, b, c, s in zip(frames, left, TYING.phone_of_state[labels], right, labels % 2, strict=True):
            table.setdefault((a, b, c, s), []).append(frame)
    return {key: np.array(rows) for key, rows in table.items()}


def test_statistics_are_sums_over_the_frames_of_each_triphone_state():
    table = frames_by_context()
    assert [tuple(row) for row in SEEN.contexts_K4] == sorted(table)
    for row, moments in zip(SEEN.contexts_K4, SEEN.moments, strict=True):
        frames = table[tuple(row)]
        assert moments == pytest.approx(np.concatenate([[len(frames)], frames.sum(0), (frames**2).sum(0)]))


def test_likelihood_from_moments_is_that_of_the_frames():
    x = np.random.default_rng(0).standard_normal((50, 3))
    moments = np.concatenate([[50], x.sum(0), (x**2).sum(0)])
    assert log_likelihood(moments) == pytest.approx(fitted(x))


def test_the_first_split_is_the_best_that_brute_force_finds():
    table, questions = frames_by_context(), questions_from(SEEN)
    best = (-np.inf,)
    for phone, position in itertools.product(range(1, 6), range(2)):
        mine = {key: x for key, x in table.items() if key[1] == phone and key[3] == position}
        both = fitted(np.concatenate(list(mine.values())))
        for side, question in itertools.product((0, 2), range(len(questions))):
            answers = [
                np.concatenate(
                    [x for key, x in mine.items() if questions[question, key[side]] == wanted] or [np.zeros((0, 2))]
                )
                for wanted in (True, False)
            ]
            if min(map(len, answers)) >= 20:
                best = max(best, (sum(map(fitted, answers)) - both, phone, position, side // 2, question))
    grower = _Grower(SEEN, min_count=20)
    node = grower.heap[0][1]
    gain = grower.split_best()
    assert gain == pytest.approx(best[0])
    assert grower.seen.contexts_K4[grower.rows[node]][0, [1, 3]].tolist() == list(best[1:3])
    assert grower.nodes[node][0] == best[3]


def test_gains_fall_and_sum_to_what_the_leaves_have_won():
    grower = _Grower(SEEN, min_count=20)
    start = sum(log_likelihood(SEEN.moments[rows].sum(axis=0)) for rows in grower.rows)
    gains = [grower.split_best() for _ in range(6)]
    leaves = [rows for rows, node in zip(grower.rows, grower.nodes, strict=True) if node[0] < 0]
    end = sum(log_likelihood(SEEN.moments[rows].sum(axis=0)) for rows in leaves)
    assert end - start == pytest.approx(sum(gains))
    assert min(gains) > 0


def test_what_depends_on_context_is_split_by_the_question_that_was_planted():
    tree = decision_tree(SEEN, TYING.num_states + 2, min_count=20)
    for phone, left, other in itertools.product(VOWELS, NASALS, (0, 1, 5)):
        same = tree.chains(left, phone, 0)[0], tree.chains(other, phone, 0)[0]
        assert same[0] != same[1]
        assert tree.chains(left, phone, 0)[1] == tree.chains(other, phone, 0)[1]
    assert (tree.chains(3, 5, 0) == tree.chains(1, 5, 0)).all()


def test_like_phones_are_asked_for_together():
    questions = {frozenset(np.flatnonzero(row)) for row in questions_from(SEEN)}
    assert frozenset(NASALS) in questions
    assert frozenset(VOWELS) in questions
    assert {frozenset([phone]) for phone in range(6)} <= questions
    assert frozenset(range(6)) not in questions


@pytest.mark.parametrize("num_states", [12, 13, 20, 10**6])
def test_every_triphone_has_states_of_its_own_phone_and_position_seen_or_not(num_states):
    tree = decision_tree(SEEN, num_states, min_count=20)
    assert TYING.num_states <= tree.num_states <= num_states
    assert num_states in {tree.num_states, 10**6}
    left, phone, right = np.indices((6, 6, 6)).reshape(3, -1)
    chains = tree.chains(left, phone, right)
    assert (tree.phone_of_state[chains] == phone[:, None]).all()
    assert (tree.position_of_state[chains] == np.arange(2)).all()
    assert set(chains.ravel()) == set(range(tree.num_states))


def test_every_leaf_has_its_least_number_of_frames_where_any_split_was_made():
    tree = decision_tree(SEEN, 10**6, min_count=50)
    labels = [relabelled(each, TYING, tree) for each in LABELS]
    count = np.bincount(np.concatenate(labels), minlength=tree.num_states)
    assert count.min() >= 50


def test_silence_is_never_split():
    tree = decision_tree(SEEN, 10**6, min_count=1)
    assert (tree.phone_of_state == 0).sum() == 2


def test_a_phone_that_was_never_seen_has_states_too():
    wider = Monophones((*TYING.phones, "ZH"), 2)
    seen = ContextStatistics.of(FRAMES, LABELS, wider)
    tree = decision_tree(seen, 20, min_count=20)
    assert (tree.phone_of_state == 6).sum() == 2
    assert len(set(tree.chains(6, 6, 6))) == 2


def test_trees_repeat_and_survive_json():
    tree = decision_tree(SEEN, 18, min_count=20)
    again = tying_from_json(json.loads(json.dumps(tree.to_json())))
    twin = decision_tree(ContextStatistics.of(*speech(), TYING), 18, min_count=20)
    left, phone, right = np.indices((6, 6, 6)).reshape(3, -1)
    for other in (again, twin):
        assert (other.chains(left, phone, right) == tree.chains(left, phone, right)).all()
    assert tying_from_json(TYING.to_json()).phones == TYING.phones
    with pytest.raises(SpeechError, match="did you mean 'tree'"):
        tying_from_json({**tree.to_json(), "kind": "tre"})


def test_relabelling_keeps_phones_positions_and_times():
    tree = decision_tree(SEEN, 18, min_count=20)
    new = relabelled(LABELS[0], TYING, tree)
    assert (tree.phone_of_state[new] == TYING.phone_of_state[LABELS[0]]).all()
    assert (tree.position_of_state[new] == TYING.position_of_state[LABELS[0]]).all()
    assert (relabelled(new, tree, TYING) == LABELS[0]).all()


def test_fewer_states_than_phones_and_positions_are_refused():
    with pytest.raises(SpeechError, match="12, got 11"):
        decision_tree(SEEN, 11)
