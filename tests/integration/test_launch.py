"""`roundelay launch` with real processes: what it shows, how it ends, what it starts again, and what it leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from roundelay.cli import main

LAUNCH = [sys.executable, "-m", "roundelay", "launch"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "05_elastic_loop.py"
PATIENCE_S = 120.0

pytestmark = pytest.mark.timeout(300)


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def launch(*words: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False, **settings
    )


class Launched:
    """A launcher in the background, whose output goes to a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.output = folder / "output.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen([*LAUNCH, *words], stdout=file, stderr=subprocess.STDOUT)

    def wait_for(self, pattern: str, times: int = 1) -> list[str]:
        deadline = time.monotonic() + PATIENCE_S
        while len(found := re.findall(pattern, self.output.read_text())) < times:
            assert time.monotonic() < deadline, self.output.read_text()
            assert self.process.poll() is None or len(re.findall(pattern, self.output.read_text())) >= times, (
                self.output.read_text()
            )
            time.sleep(0.05)
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def background(tmp_path):
    launched = []

    def start(*words):
        launched.append(Launched(tmp_path, *words))
        return launched[-1]

    yield start
    for each in launched:
        each.end()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_lines_carry_the_learner_and_keep_their_stream(tmp_path):
    text = "import os, sys\nprint('out', sys.argv[1:], os.environ['LOCAL_WORLD_SIZE'])\nprint('err', file=sys.stderr)"
    ended = launch("--learners", "2", script(tmp_path, text), "--epochs", "3")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] out ['--epochs', '3'] 2", "[1] out ['--epochs', '3'] 2"]
    assert {"[0] err", "[1] err"} <= set(ended.stderr.splitlines())


def test_logs_go_to_one_file_per_learner(tmp_path):
    ended = launch("--learners", "2", "--logs", str(tmp_path / "logs"), script(tmp_path, "print('hello')"))
    assert ended.returncode == 0
    assert ended.stdout == ""
    assert [(tmp_path / "logs" / f"learner-{i}.log").read_text() for i in range(2)] == ["hello\n"] * 2


def test_a_module_is_run_like_a_script(tmp_path):
    (tmp_path / "ours.py").write_text("print('a module')")
    ended = launch("--learners", "1", "-m", "ours", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert ended.stdout == "[0] a module\n"


def test_one_learner_that_fails_ends_no_other_and_the_run_succeeds(tmp_path):
    text = "import os, sys, time\nif os.environ['ROUNDELAY_LEARNER'] == '1': sys.exit(3)\ntime.sleep(1); print('done')"
    ended = launch("--learners", "2", script(tmp_path, text))
    assert ended.returncode == 0
    assert "learner 1 is lost (exit code 3); the others go on" in ended.stderr
    assert ended.stdout == "[0] done\n"


def test_if_all_fail_the_run_fails(tmp_path):
    ended = launch("--learners", "2", script(tmp_path, "raise SystemExit(3)"))
    assert ended.returncode == 1
    assert "no learner has finished; the first one ended with exit code 3" in ended.stderr


def test_a_learner_is_started_again_as_often_as_asked(tmp_path):
    text = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1]) / os.environ['ROUNDELAY_LEARNER']
path.write_text(path.read_text() + os.environ['ROUNDELAY_JOINS'] if path.exists() else '0')
if os.environ['ROUNDELAY_LEARNER'] == '1': sys.exit(1)
other = path.parent / '1'
while not other.exists() or other.read_text() != '011': time.sleep(0.05)
"""
    ended = launch("--learners", "2", "--restarts", "2", script(tmp_path, text), str(tmp_path))
    assert ended.returncode == 0
    assert (tmp_path / "0").read_text() == "0"
    assert (tmp_path / "1").read_text() == "011"  # a learner that is started again joins the run
    assert "it is started again in 0.5 s" in ended.stderr
    assert "it is started again in 1 s" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(tmp_path, background, number):
    text = """
import signal, sys, time
def stop(number, frame):
    print('caught', number, flush=True); time.sleep(0.5); sys.exit(0)
signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)
print('ready', flush=True); time.sleep(60)
"""
    run = background("--learners", "2", script(tmp_path, text))
    run.wait_for("ready", 2)
    run.process.send_signal(number)
    assert run.process.wait(20) == 128 + number
    assert run.output.read_text().count("caught") == 2


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path, background):
    run = background("--learners", "2", script(tmp_path, "import os, time\nprint('pid', os.getpid())\ntime.sleep(100)"))
    pids = [int(pid) for pid in run.wait_for(r"pid (\d+)", 2)]
    run.process.kill()
    assert gone(pids)


def test_it_says_which_learners_are_missing(tmp_path, background):
    text = """
import os, pathlib, sys, time, roundelay
while os.environ['ROUNDELAY_LEARNER'] == '1' and not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)
roundelay.init().close()
"""
    run = background("--learners", "2", script(tmp_path, text), str(tmp_path / "seen"))
    run.wait_for(r"waiting at 127.0.0.1:\d+: 1 of 2 learners have come \(0\); missing: 1")
    (tmp_path / "seen").touch()
    assert run.process.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'; for a module give -m"),
        (["--here", "1", "x.py"], "--here goes with --rendezvous"),
        (["--learners", "0", "x.py"], "at least 1, got '0'"),
        (["--min-learners", "3", "x.py"], "--min-learners 3 is more than the 2 learners"),
        (["--rendezvous", "nonsense", "x.py"], "an address is HOST:PORT"),
        (["--rendezvous", "127.0.0.1:9", "--here", "3", "x.py"], "--here 3 is more than the 2 learners"),
    ],
)
def test_wrong_options_are_refused_in_one_line(tmp_path, monkeypatch, words, message, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("")
    assert main(["launch", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("strategy", ["ADPSGD", pytest.param("DPSGD", marks=pytest.mark.slow)])
def test_a_learner_that_is_killed_is_left_out_and_comes_back(background, strategy):
    run = background("--learners", "3", "--restarts", "-1", str(EXAMPLE), "--epochs", "300", "--strategy", strategy)
    run.wait_for(r"epoch 3:", 3)
    (pid,) = run.wait_for(r"process (\d+) is learner 0\n")
    os.kill(int(pid), signal.SIGKILL)
    (again,) = run.wait_for(r"process (\d+) is learner 0, which joined")
    assert again != pid
    run.wait_for(r"\[0\] epoch \d+: .* learners \(0, 1, 2\)")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(30) == 128 + signal.SIGTERM


KILLED_OFTEN = Path(__file__).parent / "programs" / "killed_often.py"
KILLS, EPOCHS, SAMPLES = 10, 400, 512


def final_losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"mean model: loss ([\d.]+)", text)]


def assert_exact(folder: Path, number: int) -> None:
    """All learners had the same consensus, and it is the mean of their own weights."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob(f"compared-{number}-*.json"))]
    assert [each["members"] for each in told] == [[0, 1, 2]] * 3
    expected = np.mean([each["own"] for each in told], axis=0)
    for each in told:
        assert each["mean"] == told[0]["mean"]
        np.testing.assert_allclose(each["mean"], expected, rtol=1e-12)


def uses(folder: Path) -> tuple[Counter[int], Counter[int]]:
    """How often each sample was used in a step that ended, and how often in one during which its learner was killed."""
    ended, cut_off = Counter(), Counter()
    for path in folder.glob("used-*.txt"):
        lines = path.read_text().splitlines()
        for begin, end in itertools.zip_longest(lines[::2], lines[1::2]):
            (ended if end == "end" else cut_off).update(json.loads(begin.removeprefix("begin ")))
    return ended, cut_off


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_learner_zero_is_killed_ten_times_and_the_model_is_as_good_as_undisturbed(background, tmp_path):
    undisturbed = []
    for seed in (1, 2, 3):
        folder = tmp_path / f"undisturbed-{seed}"
        folder.mkdir()
        (folder / "hurry").touch()
        ended = launch("--learners", "3", str(KILLED_OFTEN), str(folder), str(EPOCHS), str(seed))
        assert len(set(final_losses(ended.stdout))) == 1, ended.stderr
        undisturbed += final_losses(ended.stdout)[:1]
    folder = tmp_path / "disturbed"
    folder.mkdir()
    run = background("--learners", "3", "--restarts", "-1", str(KILLED_OFTEN), str(folder), str(EPOCHS), "0")
    for kills in range(KILLS):
        pids = run.wait_for(r"process (\d+) is learner 0", kills + 1)
        time.sleep(0.5)
        os.kill(int(pids[-1]), signal.SIGKILL)
        run.wait_for(r"process \d+ is learner 0", kills + 2)
        (folder / f"consensus-{kills}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while len(list(folder.glob(f"compared-{kills}-*.json"))) < 3:
            assert time.monotonic() < deadline, run.output.read_text()
            time.sleep(0.05)
        assert_exact(folder, kills)
    (folder / "hurry").touch()
    assert run.process.wait(300) == 0
    losses = final_losses(run.output.read_text())
    assert len(losses) == 3
    assert len(set(losses)) == 1
    # Noise: four standard deviations of the undisturbed runs, whose seeds differ; three of them are few, so 1 % at least.
    noise = max(4 * statistics.stdev(undisturbed), 0.01 * statistics.mean(undisturbed))
    assert abs(losses[0] - statistics.mean(undisturbed)) < noise
    ended, cut_off = uses(folder)
    assert all(ended[sample] + cut_off[sample] >= EPOCHS for sample in range(SAMPLES))
    assert sum(ended.values()) <= EPOCHS * SAMPLES + KILLS * 16  # the batch of a kill may be used twice
