"""Shell completion, tried in the shells themselves."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from roundelay.cli import main
from roundelay.cli.arguments import STRATEGIES
from roundelay.strategies.registry import STRATEGIES as REGISTERED

# What bash does when TAB is pressed after the words: it fills COMP_WORDS, calls the function and reads COMPREPLY.
PRESS_TAB = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
function=$(complete -p roundelay | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function roundelay "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
CASES = {
    "roundelay tr": {"train"},
    "roundelay train ti": {"tiny"},
    "roundelay train tiny --strategy d": {"dpsgd", "delay-by-one", "delay-by-one-gradients"},
    "roundelay simulate tiny --topology random-": {"random-ring", "random-matching"},
    "roundelay reproduce str": {"stragglers"},
    "roundelay bench thr": {"throughput"},
    "roundelay train --resu": {"--resume"},
}


def script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}")


@needs("bash")
@pytest.mark.parametrize("typed", CASES)
def test_bash_completes(typed, capsys):
    pressed = script("bash", capsys) + PRESS_TAB.format(words=shlex.join(typed.split()))
    ended = subprocess.run(["bash", "-c", pressed], capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) == CASES[typed]


@needs("fish")
@pytest.mark.parametrize("typed", CASES)
def test_fish_completes(typed, capsys):
    pressed = script("fish", capsys) + f"\ncomplete -C {shlex.quote(typed)}\n"
    ended = subprocess.run(["fish", "--no-config", "-c", pressed], capture_output=True, text=True, check=True)
    assert {line.split("\t")[0] for line in ended.stdout.splitlines() if line.strip()} == CASES[typed]


@needs("zsh")
def test_zsh_takes_the_script(capsys):
    completion = script("zsh", capsys)
    prepared = 'autoload -Uz compinit; compinit -u -D; eval "$(cat)"; print $_comps[roundelay]'
    ended = subprocess.run(["zsh", "-f", "-c", prepared], input=completion, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["_shtab_roundelay"]
    assert "--strategy" in completion


def test_the_names_of_strategies_that_are_listed_without_torch_are_those_of_the_registry():
    assert set(STRATEGIES) == set(REGISTERED)


def test_another_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
