"""The `roundelay` command: help, version, unknown and renamed commands, and exit codes."""

from __future__ import annotations

import builtins
import importlib.util
import subprocess
import sys

import pytest

import roundelay
from roundelay.cli import COMMANDS, RENAMED, all_commands, build_parser, main, topology
from roundelay.simulation.problems import digits


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"roundelay {roundelay.__version__}\n"


def test_without_a_command_the_help_lists_them_all(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", sorted(all_commands(build_parser())))
def test_the_help_of_a_command_fits_a_terminal_of_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = all_commands(build_parser())[command]
    assert all(len(line) <= 80 for line in parser.format_help().splitlines())


def test_the_help_of_a_benchmark_keeps_capitals():
    said = " ".join(all_commands(build_parser())["bench accelerator"].format_help().split())
    assert "Whether adpsgd hides" in said
    assert "emulated without CUDA." in said


def test_an_unknown_command_is_refused_with_the_nearest_one(mistake):
    assert "unknown command 'topolgy'; did you mean 'topology'?" in mistake("topolgy", "ring")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_command_is_refused_with_the_new_one_which_exists(mistake, capsys, old, new):
    assert f"`roundelay {old}` is now `roundelay {new}`" in mistake(old, "--learners", "8")
    with pytest.raises(SystemExit) as ended:
        main([*new.split(), "--help"])
    assert ended.value.code == 0


def test_abbreviated_options_are_refused(mistake):
    assert "unrecognized arguments: --learn 8" in mistake("topology", "ring", "--learn", "8")


@pytest.mark.parametrize("words", ["topology ring --no", "bench throughput --no", "speech corpus an4 --no"])
def test_an_unknown_option_is_refused_with_the_help_of_its_command(mistake, words):
    command = words.removesuffix(" ring --no").removesuffix(" an4 --no").removesuffix(" --no")
    assert mistake(*words.split()).endswith(f"see `roundelay {command} --help`")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train tiny --learner 4", "unrecognized arguments: --learner 4; did you mean '--learners'?"),
        ("bench througput", "unknown value 'througput'; did you mean 'throughput'?"),
        ("bench", "the following arguments are required: WHAT, one of throughput, stragglers"),
        ("launch --restarts x a.py", "needs a whole number of at least 0, or -1 for no limit, got 'x'"),
        ("topology ring --seed x", "needs a whole number of at least 0, got 'x'"),
        ("train --join nowhere", "--join needs the directory of a run, or HOST:PORT of its rendezvous; there is no"),
        ("train tiny --strategy allreduce --topology ring", "topology ring has no effect on allreduce"),
        ("help", "unknown command 'help'. Known: train"),
    ],
)
def test_a_mistake_is_answered_with_what_is_allowed(mistake, words, said):
    assert said in mistake(*words.split())


def test_an_option_before_the_command_is_refused(mistake):
    assert "the command comes before its options, got '--learners' first" in mistake("--learners", "8", "topology")


def test_drawing_without_matplotlib_says_what_to_install(mistake, monkeypatch, tmp_path):
    real_import = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    line = mistake("topology", "ring", "--learners", "8", "--draw", str(tmp_path / "a.svg"))
    assert line.endswith("pip install 'roundelay[plots]'")


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("bench throughput --plot a.svg", "matplotlib", "plots"),
        ("bench network --plot a.svg", "matplotlib", "plots"),
        ("plan --learners 8 --model-bytes 1MB --step-time 1s --plot a.svg", "matplotlib", "plots"),
        ("topology compare --learners 8 --plot a.svg", "matplotlib", "plots"),
        ("reproduce rate --out out", "matplotlib", "plots"),
        ("reproduce rate", "scipy", "analysis"),
        ("reproduce rate mixing", "sklearn", "digits"),
        ("train tiny", "sklearn", "digits"),
        ("train tiny --set metrics.tensorboard=true", "tensorboard", "tensorboard"),
        ("train imagenet --data .", "PIL", "vision"),
        ("train an4", "soundfile", "speech"),
        ("train synth", "espeakng_loader", "synth"),
        ("train switchboard", "lhotse", "switchboard"),
        ("simulate synth", "espeakng_loader", "synth"),
        ("speech corpus synth", "espeakng_loader", "synth"),
        ("speech corpus manifest .", "soundfile", "speech"),
        ("bench speech", "soundfile", "speech"),
    ],
)
def test_a_missing_extra_is_named_before_anything_starts(mistake, monkeypatch, tmp_path, words, package, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    monkeypatch.chdir(tmp_path)
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
    digits.cache_clear()
    assert mistake(*words.split()).endswith(
        f"needs the '{extra}' extra; install it with: pip install 'roundelay[{extra}]'"
    )


@pytest.mark.parametrize(
    ("raised", "code", "message"), [(MemoryError, 2, "does not fit into memory"), (KeyboardInterrupt, 130, "")]
)
def test_out_of_memory_and_ctrl_c_give_no_traceback(capsys, monkeypatch, raised, code, message):
    def fail(mixing):
        raise raised

    monkeypatch.setattr(topology, "spectrum", fail)
    assert main(["topology", "ring", "--learners", "8"]) == code
    assert message in capsys.readouterr().err


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m roundelay topology compare --learners 8 --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "[\n0\n"
    assert ended.stderr == ""


def test_the_command_line_starts_without_torch_and_matplotlib():
    code = "import sys, roundelay.cli as c; c.main(['topology', 'ring', '--learners', '8']); "
    code += "print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.endswith("[]\n")
