"""The directory of a run, served to learners of other machines."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from roundelay.errors import CheckpointError
from roundelay.training.checkpoint import Checkpoints, pieces
from roundelay.training.directory_server import DirectoryServer, Listing, RemoteDirectory, directory_id
from roundelay.training.other_machines import copy_piece
from roundelay.transport.security import Security

SECRET = Security(bytes(range(32)))


def directory(path, learner=0, *numbers, living=(0, 1)):
    """A run's directory in which one learner has saved."""
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text("")
    (path / "metrics.jsonl").write_text('{"kind": "event"}\n')
    saving = Checkpoints(path / "checkpoints", learner, 2)
    for number in numbers:
        saving.save(number, {"x": torch.full((3,), float(learner))}, living)
    saving.close()
    return path


@pytest.fixture
def served(tmp_path):
    folder = directory(tmp_path / "served", 0, 100, 200)
    with contextlib.closing(DirectoryServer(folder, "127.0.0.1", SECRET)) as server:
        yield folder, server


def test_another_machine_sees_what_the_directory_holds(served):
    folder, server = served
    with RemoteDirectory(server.address, SECRET) as other:
        listing = other.listing()
    assert listing == Listing.of(folder)
    assert listing.pieces == pieces(folder / "checkpoints")
    assert list(listing.pieces) == [100, 200]
    assert listing.complete == []  # learner 1 has not saved here
    assert listing.metrics == ["metrics.jsonl"]


def test_a_piece_is_copied_with_what_describes_it(served, tmp_path):
    folder, server = served
    own = directory(tmp_path / "own", 1, 100)
    with RemoteDirectory(server.address, SECRET) as other:
        copy_piece(other, own, 100, other.listing().pieces[100][0])
    name = "checkpoints/000000000000100/learner-0"
    for ending in (".safetensors", ".json"):
        assert (own / f"{name}{ending}").read_bytes() == (folder / f"{name}{ending}").read_bytes()


def test_a_piece_that_is_not_what_its_description_says_is_refused(served, tmp_path):
    folder, server = served
    own = directory(tmp_path / "own")
    with RemoteDirectory(server.address, SECRET) as other:
        piece = other.listing().pieces[200][0]
        (folder / "checkpoints/000000000000200/learner-0.safetensors").write_bytes(b"torn")
        with pytest.raises(CheckpointError, match="learner 0 at 200 is torn or altered"):
            copy_piece(other, own, 200, piece)
    assert pieces(own / "checkpoints") == {}


@pytest.mark.parametrize(
    "name", ["config.toml", "../secret", "checkpoints/../../secret", "/etc/hostname", "ticket.json", "metrics.jsonl/.."]
)
def test_other_files_are_not_served(served, name):
    with (
        RemoteDirectory(served[1].address, SECRET) as other,
        pytest.raises(OSError, match="only checkpoints and metrics are served"),
    ):
        other.read(name)


def test_a_file_that_is_gone_is_refused_and_the_connection_stays(served):
    with RemoteDirectory(served[1].address, SECRET) as other:
        with pytest.raises(FileNotFoundError, match="No such file"):
            other.read("checkpoints/000000000000300/learner-0.safetensors")
        assert bytes(other.read("metrics.jsonl")) == b'{"kind": "event"}\n'


def test_an_empty_file_is_served(served):
    (served[0] / "metrics-x.jsonl").touch()
    with RemoteDirectory(served[1].address, SECRET) as other:
        assert bytes(other.read("metrics-x.jsonl")) == b""


def test_without_the_secret_nothing_is_served(served):
    with pytest.raises(ConnectionError):
        RemoteDirectory(served[1].address, Security(bytes(32)))


def test_a_directory_has_one_id_however_it_is_named_and_two_directories_have_two(tmp_path):
    one, other = directory(tmp_path / "one"), directory(tmp_path / "other")
    (tmp_path / "link").symlink_to(one)
    assert directory_id(one) == directory_id(tmp_path / "link") != directory_id(other)


def test_a_listing_survives_json(tmp_path):
    listing = Listing.of(directory(tmp_path / "run", 1, 100, living=(1,)))
    assert listing.complete == [100]
    assert Listing.from_table(json.loads(json.dumps(vars(listing)))) == listing
