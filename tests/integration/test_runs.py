"""Real runs by the command line: killed, interrupted, resumed, resumed by others, and with a file altered."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.cli import main
from roundelay.training import checkpoint, recipe_files, recipes
from roundelay.weights.serialization import read_state

PATIENCE_S = 240.0
COMMAND = [sys.executable, "-m", "roundelay", "train", "tiny"]
RUN = ["--strategy", "dpsgd", "--epochs", "6", "--set", "checkpoint.every_epochs=1", "--set", "checkpoint.keep=3"]

pytestmark = pytest.mark.timeout(600)


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--out", str(folder), *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@contextlib.contextmanager
def ran(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run in the background; whatever happens, nothing of it is left."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        command, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill(process)
        process.communicate()


def started(folder: Path, *words: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return ran([*COMMAND, "--out", str(folder), *words])


def wait_for_checkpoints(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.glob("checkpoints/*/manifest.json"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill(process: subprocess.Popen[str]) -> None:
    for pid in [*children(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended = train(folder, *RUN, "--json")
    assert ended.returncode == 0, ended.stderr
    (folder / "said.json").write_text(ended.stdout)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run whose processes were all killed somewhere in an epoch, after its second checkpoint.

    Beside it: what `--resume` said while the run was running, and the process that ran it.
    """
    folder = tmp_path_factory.mktemp("killed") / "run"
    with started(folder, *RUN, "--slow", "0:30") as process:
        wait_for_checkpoints(folder, 2, process)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(["train", "--out", str(folder), "--resume"])
        kill(process)
    (folder.parent / "refused.json").write_text(json.dumps([code, said.getvalue(), process.pid]))
    return folder


@pytest.fixture
def copy_of(tmp_path):
    def copied(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "run"))

    return copied


def test_a_finished_run_leaves_a_model_and_what_it_is_worth(whole):
    results = json.loads((whole / "results.json").read_text())
    assert results["test"]["accuracy"] > 0.8
    assert (whole / "model.safetensors").exists()
    assert len(list((whole / "logs").glob("learner-*.log"))) == 4
    assert json.loads((whole / "said.json").read_text()) == results | {"run": str(whole)}, "the command prints the same"


def test_a_run_killed_in_the_middle_of_an_epoch_resumes_bit_identically(whole, killed, copy_of):
    folder = copy_of(killed)
    assert not (folder / "model.safetensors").exists()
    ended = train(folder, "--resume", "--slow", "")
    assert ended.returncode == 0, ended.stderr
    assert "going on with" in ended.stderr
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_three_learners_go_on_where_four_were(killed, copy_of):
    folder = copy_of(killed)
    ended = train(folder, "--resume", "--slow", "", "--learners", "3")
    assert ended.returncode == 0, ended.stderr
    results = json.loads((folder / "results.json").read_text())
    assert results["learners"] == 3
    assert results["test"]["accuracy"] > 0.8
    assert "3 learners go on from the mean of the 4 that saved" in (folder / "logs" / "learner-0.log").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--strategy", "allreduce"],
            "the run has strategy dpsgd, and its checkpoints have no state for allreduce; go on",
        ),
        (
            ["--set", "optimizer.name=adam"],
            "the run has optimizer.name sgd, and its checkpoints have no state for adam; go on",
        ),
        (["--set", "settings.hidden=99"], "weight '0.weight' has shape (99, 64), and the checkpoint has (128, 64)"),
        (["--epochs", "1"], "epochs, more than 1; set budget.epochs to at least"),
    ],
)
def test_a_change_that_does_not_fit_the_checkpoint_is_refused_and_changes_nothing(
    killed, copy_of, words, message, capsys
):
    folder = copy_of(killed)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert main(["train", "--out", str(folder), "--resume", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"} == before


def test_a_run_that_is_running_cannot_be_resumed(killed):
    code, said, pid = json.loads((killed.parent / "refused.json").read_text())
    assert code == 2
    assert said.count("\n") == 1
    assert f"is in use by process {pid} on " in said


def test_a_flipped_byte_is_refused_by_name_and_the_previous_checkpoint_offered(killed, copy_of, capsys):
    folder = copy_of(killed)
    first, *_, last = checkpoint.complete(folder / "checkpoints")
    path = last.path(2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    assert main(["train", "--out", str(folder), "--resume"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{last.folder.name}/learner-2.safetensors' is torn or altered" in said
    assert "is whole: --resume" in said
    assert checkpoint.choose(folder / "checkpoints", first.samples_seen).samples_seen == first.samples_seen


def stopped(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal; the command that the run prints when it has ended."""
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, said
    assert "stopped and saved; go on with:" in said
    return said.rstrip("\n").rpartition("\n")[2].strip()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_a_run_with_a_checkpoint_and_a_command_that_runs_as_printed(tmp_path, monkeypatch, number):
    """Twice; and the run that is resumed goes on when a learner dies."""
    monkeypatch.chdir(tmp_path)
    folder = Path("my run")
    words = ["--strategy", "adpsgd", "--set", "checkpoint.keep=9", "--slow", "0:20,1:20,2:20,3:20"]
    with started(folder, *RUN, *words) as process:
        wait_for_checkpoints(folder, 1, process)
        printed = stopped(process, number)
    newest = checkpoint.choose(folder / "checkpoints")
    saved = len(checkpoint.complete(folder / "checkpoints"))
    assert sorted(newest.files) == [0, 1, 2, 3]
    assert printed == "roundelay train --out 'my run' --resume"
    with started(folder, "--resume", str(newest.samples_seen)) as process:  # the number is not printed again
        wait_for_checkpoints(folder, saved + 1, process)
        assert stopped(process, number) == printed
    saved = len(checkpoint.complete(folder / "checkpoints"))
    with ran(["bash", "-c", f"exec {printed}"]) as process:
        wait_for_checkpoints(folder, saved + 1, process)
        os.kill(children(process.pid)[2], signal.SIGKILL)
        stdout, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "learner 2 died (killed by SIGKILL); 3 live" in said, "the others go on"
    results = json.loads((folder / "results.json").read_text())
    assert results["finished"]
    assert results["test"]["accuracy"] > 0.7
    assert stdout.startswith("mean model, valid: loss")
    assert "finished in" in stdout


def test_a_graph_file_and_a_strategy_class_of_the_users_own_are_as_good_as_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pair.edgelist").write_text("0 1\n")
    Path("my_strategy.py").write_text("import roundelay\n\nclass Mine(roundelay.DPSGD):\n    pass\n")
    assert main(["topology", "pair.edgelist"]) == 0
    words = ["--topology", "pair.edgelist", "--epochs", "1"]
    ended = train(Path("run"), *words, "--learners", "2", "--strategy", "my_strategy:Mine")
    assert ended.returncode == 0, ended.stderr
    assert main(["train", "tiny", "--out", "other", *words, "--learners", "3"]) == 2
    assert "is for 2 learners, but there are 3" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", sorted(recipe_files.built_in()))
def test_the_configuration_of_a_recipe_is_shown_without_its_data(recipe, monkeypatch, capsys):
    monkeypatch.delenv("ROUNDELAY_DATA", raising=False)
    assert main(["train", recipe, "--show-config"]) == 0
    assert recipes.from_table(tomllib.loads(capsys.readouterr().out)).task


@pytest.mark.slow
def test_with_a_learner_ten_times_slower_every_sample_is_used_exactly_once_an_epoch(tmp_path):
    folder = tmp_path / "run"
    ended = train(folder, "--epochs", "3", "--slow", "0:10", "--set", "data.sharding=dynamic")
    assert ended.returncode == 0, ended.stderr
    last = checkpoint.choose(folder / "checkpoints")
    used = [read_state(last.path(learner))["used"].tolist() for learner in range(4)]
    assert Counter(number for numbers in used for number in numbers) == Counter(range(3 * 82))
    assert len(used[0]) < min(map(len, used[1:]))


@pytest.mark.slow
def test_under_torchrun_the_command_joins_what_is_there(tmp_path):
    folder = tmp_path / "run"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "roundelay",
        "train",
        "tiny",
    ]
    words = ["--out", str(folder), "--epochs", "4", "--group-size", "2"]
    ended = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((folder / "results.json").read_text())["learners"] == 2


def test_a_run_is_not_overwritten(whole, capsys):
    assert main(["train", "tiny", "--out", str(whole), *RUN]) == 2
    assert "holds a run already; go on with it by --resume, or choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "adpsg"], "unknown strategy 'adpsg'; did you mean 'adpsgd'?"),
        (["--set", "data.bach=3"], "unknown key 'data.bach'"),
        (["--set", "data.batch"], "--set needs KEY=VALUE"),
        (["--learners", "0"], "learners must be at least 1, got 0"),
        (["--resume"], "there is no run in"),
    ],
)
def test_wrong_input_is_one_line_and_starts_nothing(tmp_path, words, message, capsys):
    folder = tmp_path / "run"
    assert main(["train", "tiny", "--out", str(folder), *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not folder.exists()
