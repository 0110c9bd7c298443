from __future__ import annotations

import contextlib
import resource
import threading
from pathlib import Path

from roundelay.training.metrics import JsonLines, Meter, TensorBoard, read_rows


def test_lines_of_learners_that_write_at_once_never_mix(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def write(rank: int) -> None:
        sink = JsonLines(path)
        for step in range(200):
            sink.write({"kind": "learner", "learner": rank, "step": step, "padding": "x" * 500})
        sink.close()

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = list(read_rows(path))
    assert len(rows) == 800
    assert all([row["step"] for row in rows if row["learner"] == rank] == list(range(200)) for rank in range(4))


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "event", "event": "died"}\n{"kind": "lear')
    assert [row["kind"] for row in read_rows(path)] == ["event"]


@contextlib.contextmanager
def space_for(size: int):
    """Files cannot grow beyond `size` bytes: the rest of a write is cut off, and the next write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_rows_and_the_next_row_is_whole_again(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"kind": "event", "number": 1})
    with space_for(path.stat().st_size + 9):
        for number in (2, 3, 4):
            sink.write({"kind": "event", "number": number})
    sink.write({"kind": "event", "number": 5})
    sink.close()
    assert [row["number"] for row in read_rows(path)] == [1, 5]
    assert caplog.text.count("cannot write to") == 1
    assert "3 rows are lost" in caplog.text


def test_a_device_without_space_raises_nothing(caplog):
    sink = JsonLines(Path("/dev/full"))
    sink.write({"kind": "event"})
    sink.close()
    assert "No space left on device" in caplog.text


def test_a_row_has_the_mean_loss_of_the_finite_steps_since_the_last():
    meter = Meter([], every_s=0.0)
    for loss in (1.0, 3.0, float("nan")):
        meter.add(loss, samples=4)
    row = meter.window()
    assert row["loss"] == 2.0
    assert row["samples_per_s"] > 0
    assert "loss" not in meter.window()


def test_the_last_window_counts_only_if_there_was_no_other():
    clock = iter(float(second) for second in range(100))
    meter = Meter([], every_s=1.0, now=lambda: next(clock))
    meter.add(2.0, 8)
    assert meter.last_window()["loss"] == 2.0
    meter.add(3.0, 8)
    assert meter.last_window() == {}


def test_tensorboard_writes_event_files(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.write({"kind": "evaluation", "split": "valid", "samples_seen": 10, "loss": 0.5})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(10, 0.5)]
