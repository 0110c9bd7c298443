"""The first living learner collects the checkpoints and metrics of machines with directories of their own."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from roundelay.cluster.membership import Membership, View
from roundelay.training.checkpoint import Checkpoints, complete, pieces
from roundelay.training.directory_server import DirectoryServer, machine_name
from roundelay.training.other_machines import CheckpointCollector, OtherMachines
from roundelay.transport.security import Security

SECRET = Security(bytes(range(32)))


class Machine:
    """A machine with one learner, whose directory is served."""

    def __init__(self, folder, learner, living):
        self.folder, self.learner, self.living = folder, learner, living
        folder.mkdir(exist_ok=True)
        if not (folder / "config.toml").exists():
            (folder / "config.toml").write_text("")
        self.server = DirectoryServer(folder, "127.0.0.1", SECRET)
        self.checkpoints = Checkpoints(folder / "checkpoints", learner, 2)

    def collects_from(self, *machines):
        """Its collector, if these are the machines of the run."""
        served = {each.learner: each.server.address for each in machines}
        view = View(Membership(self.living, 0), {})
        client = SimpleNamespace(id=self.learner, view=view, served_files=lambda: served)
        self.others = OtherMachines(self.folder, client, self.server.address, SECRET)
        self.collector = CheckpointCollector(self.checkpoints, self.others)
        return self.collector

    def save(self, *numbers):
        for number in numbers:
            self.checkpoints.save(number, {"x": torch.full((3,), float(self.learner))}, self.living)
        self.checkpoints.wait()

    def close(self):
        self.checkpoints.close()
        self.server.close()


@pytest.fixture
def machines(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(*names):
            living = tuple(range(len(names)))
            made = [Machine(tmp_path / name, learner, living) for learner, name in enumerate(names)]
            for each in made:
                stack.callback(each.close)
            return made

        yield make


def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.02)
    pytest.fail("it did not happen in 10 s")


def test_the_first_learner_collects_a_checkpoint_as_soon_as_the_others_have_saved(machines):
    first, second = machines("first", "second")
    with contextlib.closing(first.collects_from(first, second)) as collector:
        first.save(100)
        collector.saved(100, (0, 1))
        second.save(100)
        wait_for(lambda: complete(first.folder / "checkpoints"))
    (found,) = complete(first.folder / "checkpoints")
    found.verify()
    assert list(found.files) == [0, 1]


def test_an_older_checkpoint_is_still_collected_while_a_slow_learner_lacks_the_newest(machines):
    first, slow = machines("first", "slow")
    with contextlib.closing(first.collects_from(first, slow)) as collector:
        first.save(100, 200)
        collector.saved(100, (0, 1))
        collector.saved(200, (0, 1))
        slow.save(100)
        wait_for(lambda: [each.samples_seen for each in complete(first.folder / "checkpoints")] == [100])


def test_a_learner_that_was_lost_is_not_waited_for(machines):
    first, lost = machines("first", "lost")
    collector = first.collects_from(first, lost)
    first.others._client.view = View(Membership((0,), 1), {})
    first.save(100)
    with contextlib.closing(collector):
        assert collector.collect(100, (0, 1)) == [0]
        collector.saved(100, (0, 1))
        wait_for(lambda: complete(first.folder / "checkpoints"))


def test_the_file_of_a_learner_that_was_lost_after_it_saved_is_collected(machines):
    first, lost = machines("first", "lost")
    collector = first.collects_from(first, lost)
    lost.save(100)
    first.save(100)
    with contextlib.closing(collector):
        assert collector.collect(100, (0, 1)) == [0, 1]


def test_other_machines_remove_files_that_the_first_no_longer_needs(machines):
    first, second = machines("first", "second")
    second.save(100, 200, 300, 400)
    with contextlib.closing(first.collects_from(first, second)) as collector:
        for number in (300, 400):  # it keeps two complete ones
            first.save(number)
            collector.saved(number, (0, 1))
            wait_for(lambda: number in [each.samples_seen for each in complete(first.folder / "checkpoints")])  # noqa: B023
    with contextlib.closing(second.collects_from(first, second)) as collector:
        collector.saved(400, (0, 1))
        wait_for(lambda: list(pieces(second.folder / "checkpoints")) == [300, 400])


def test_nothing_is_copied_between_machines_that_see_one_directory(machines):
    first, second = machines("shared", "shared")
    with contextlib.closing(first.collects_from(first, second)):
        second.save(100)
        first.others.fetch({100: {1}})
        first.others.copy_metrics()
        assert first.others.first_listing() is None
    assert not list(first.folder.glob("metrics-from-*"))


def test_metrics_are_copied_once_under_a_name_of_their_machine(machines):
    first, second = machines("first", "second")
    first.collects_from(first, second)
    (second.folder / "metrics.jsonl").write_text('{"kind": "event"}\n')
    (second.folder / "metrics-from-elsewhere.jsonl").write_text("a copy of an earlier part")
    first.others.copy_metrics()
    first.others.copy_metrics()
    (copy,) = first.folder.glob("metrics*.jsonl")
    assert copy.name == f"metrics-from-{machine_name(second.folder)}.jsonl"
    assert copy.read_text() == '{"kind": "event"}\n'
    first.collector.close()
