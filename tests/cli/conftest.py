"""How a user's mistake must look."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roundelay.cli import main


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line that must fail: one line on stderr, nothing on stdout, exit code 2; gives back the line."""

    def run(*words: str) -> str:
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("roundelay: error: ")
        assert err.count("\n") == 1
        return err.strip()

    return run
