from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from roundelay.errors import ConfigError
from roundelay.training.open_files import allow_open_files


@pytest.fixture
def limits(monkeypatch):
    """The limits of the process: (soft, hard)."""
    now = [(64, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.__setitem__(0, pair))
    return now


def test_a_low_soft_limit_is_raised_as_far_as_needed(limits):
    allow_open_files(8)
    assert limits == [(128, 4096)]
    limits[0] = (1024, 4096)
    allow_open_files(8)
    assert limits == [(1024, 4096)]


def test_without_a_hard_limit_only_the_soft_one_counts(limits):
    limits[0] = (64, resource.RLIM_INFINITY)
    allow_open_files(100)
    assert limits == [(864, resource.RLIM_INFINITY)]
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    allow_open_files(100)
    assert limits == [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]


def test_a_low_hard_limit_is_refused_with_the_command_that_raises_it(limits):
    limits[0] = (64, 64)
    with pytest.raises(
        ConfigError, match=r"needs up to 128 open files per process, and the limit is 64; .*ulimit -n 128"
    ):
        allow_open_files(8)


def test_few_file_descriptors_are_one_line_before_anything_starts(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "roundelay", "train", "tiny", "--learners", "8", "--out", str(tmp_path / "run")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 2
    assert "needs up to 128 open files" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
