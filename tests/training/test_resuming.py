"""Which checkpoint machines with directories of their own resume from."""

from __future__ import annotations

import pytest

from roundelay.errors import CheckpointError
from roundelay.training.directory_server import Listing
from roundelay.training.resuming import chosen, union


def listing(*, complete=(), **pieces):
    """A directory with pieces: at100=[0, 1] are the files of learners 0 and 1 after 100 samples; four learners lived."""
    found = {
        int(number.removeprefix("at")): {
            each: {"learner": each, "file": f"learner-{each}.safetensors", "learners": [0, 1, 2, 3]}
            for each in learners
        }
        for number, learners in pieces.items()
    }
    return Listing("id", found, list(complete), [], "machine")


def test_the_newest_checkpoint_whose_files_the_machines_have_together_is_chosen():
    one = listing(at100=[0, 1], at200=[0, 1], at300=[0, 1])
    other = listing(at100=[2, 3], at200=[2, 3], at300=[2])
    assert chosen([one, other], None) == 200
    assert union([one, other])[200].keys() == {0, 1, 2, 3}


def test_a_checkpoint_that_one_machine_has_collected_needs_no_other_machine():
    assert chosen([listing(at100=[0, 1, 2, 3], complete=[100]), listing()], None) == 100


def test_learners_that_saved_after_others_were_lost_make_a_whole_checkpoint():
    left = listing(at100=[0, 1], at200=[0, 1])
    for piece in left.pieces[200].values():
        piece["learners"] = [0, 1]
    assert chosen([left], None) == 200


def test_if_files_are_missing_the_error_says_what_there_is():
    with pytest.raises(CheckpointError, match=r"100 \(of 2 learners\); go on .* by --resume 100"):
        chosen([listing(at100=[0, 1]), listing()], None)
    with pytest.raises(CheckpointError, match="no machine has a checkpoint"):
        chosen([listing(), listing()], None)


def test_a_checkpoint_that_is_asked_for_may_lack_files():
    assert chosen([listing(at100=[0, 1]), listing()], 100) == 100
    with pytest.raises(CheckpointError, match=r"no checkpoint at 50; the machines have files of 100"):
        chosen([listing(at100=[0, 1])], 50)
