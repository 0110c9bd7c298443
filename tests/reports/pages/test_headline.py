"""A report begins with the sentence that matters."""

from __future__ import annotations

import math

import pytest
from synthetic_runs import SyntheticRun

from roundelay.reports.pages.headline import headline, same_loss
from roundelay.reports.pages.read_runs import read_runs
from roundelay.reports.pages.run import Run

EVERY_S = 4  # between two evaluations of a synthetic run


@pytest.fixture
def read(tmp_path):
    """Write synthetic runs, named by their strategies, and read them."""

    def make(*runs: SyntheticRun) -> list[Run]:
        return read_runs([run.write(tmp_path / f"{run.strategy}-{number}") for number, run in enumerate(runs)])

    return make


def first_evaluation(run: SyntheticRun, loss: float) -> float:
    """When the closed form of the loss is at most `loss` at an evaluation."""
    samples = -20_000 * math.log((loss - 0.08) / 2.2)
    seconds = samples / (run.samples_seen(1000) / 1000)
    return EVERY_S * math.ceil(seconds / EVERY_S - 1e-6)


def test_the_time_to_the_lowest_loss_that_all_runs_reached(read):
    slow, fast = SyntheticRun("allreduce", slow={0: 10.0}, seconds=120), SyntheticRun(slow={0: 10.0}, seconds=40)
    common = same_loss(read(slow, fast))
    assert common.loss == pytest.approx(slow.figures(120)["loss"])
    assert common.seconds == (120.0, pytest.approx(first_evaluation(fast, common.loss)))


def test_the_sentence_names_the_runs_in_the_order_given(read):
    runs = read(SyntheticRun("allreduce", slow={0: 10.0}, seconds=120), SyntheticRun(slow={0: 10.0}, seconds=40))
    loss = same_loss(runs).loss
    assert headline(runs) == f"allreduce-0 2 min 0 s, adpsgd-1 16.0 s to the same validation loss ({loss:.4g})."
    assert headline(runs[::-1]).startswith("adpsgd-1 16.0 s, allreduce-0 2 min 0 s")


def test_of_many_runs_the_slowest_and_the_fastest_are_named(read):
    runs = read(*(SyntheticRun("dpsgd", slow={0: 1.0 + each}) for each in range(8)))
    assert headline(runs).startswith("Of 8 runs, the slowest and the fastest: dpsgd-7 40.0 s, dpsgd-0 ")


def test_simulated_runs_are_marked_in_the_sentence(read):
    runs = read(SyntheticRun("allreduce", simulated=True), SyntheticRun(simulated=True))
    assert "adpsgd-1 (simulated) " in headline(runs)


def test_losses_of_different_tasks_are_not_compared(read):
    runs = read(SyntheticRun(), SyntheticRun())
    runs[1].config = runs[1].config | {"task": "another:Task"}
    assert same_loss(runs) is None
    assert headline(runs) == ""


def test_a_run_that_never_improved_gives_no_comparison(read):
    runs = read(SyntheticRun(), SyntheticRun())
    runs[1].evaluations.clear()
    for second in (0.0, 4.0):
        row = {"kind": "evaluation", "split": "valid", "elapsed_s": second, "samples_seen": second}
        runs[1].add(row | {"loss": 2 + second})
    assert same_loss(runs) is None


def test_a_run_that_has_the_loss_at_its_first_evaluation_has_taken_at_most_so_long(read):
    """As an asynchronous run, whose first mean model is evaluated when the slowest learner has saved."""
    fast, slow = read(SyntheticRun(), SyntheticRun("allreduce"))
    for run, evaluations in ((fast, [(2.5, 0.3), (3.7, 0.2)]), (slow, [(10.0, 0.5), (20.0, 0.4)])):
        run.evaluations.clear()
        for second, loss in evaluations:
            run.add({"kind": "evaluation", "split": "valid", "elapsed_s": second, "samples_seen": second, "loss": loss})
    assert headline([fast, slow]) == "adpsgd-0 at most 2.5 s, allreduce-1 20.0 s to the same validation loss (0.4)."


def test_a_run_without_evaluations_gives_no_comparison(read):
    runs = read(SyntheticRun(), SyntheticRun())
    runs[0].evaluations.clear()
    assert same_loss(runs) is None


def test_one_run_says_how_it_ended(read):
    (run,) = read(SyntheticRun())
    assert headline([run]).startswith("Digits, adpsgd, 4 learners: finished in 40.0 s; test: loss 0.08")


def test_one_speech_run_says_its_word_error_rate_first(read):
    (run,) = read(SyntheticRun())
    run.words = {"test": {"wer": 0.0226}}
    assert "; test: WER 2.26 %, loss " in headline([run])


def test_a_run_under_way_says_how_far_it_is(read):
    (run,) = read(SyntheticRun(finished=False))
    assert "not finished: last row after 40.0 s; valid: loss 0.08" in headline([run])
