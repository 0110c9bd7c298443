"""A corpus of tones and a run trained on it, made once."""

import pytest


@pytest.fixture(scope="session")
def tones_folder(tmp_path_factory):
    from tones import write_tones

    return write_tones(tmp_path_factory.mktemp("tones"))


@pytest.fixture(scope="session")
def tones_cache(tmp_path_factory):
    """One cache for all tests of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROUNDELAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tones_run(tones_folder, tones_cache, tmp_path_factory):
    """The folder of a finished run of two asynchronous learners."""
    from runs import run_in_threads
    from tones import tones_config

    folder = tmp_path_factory.mktemp("runs") / "tones"
    run_in_threads(tones_config(tones_folder), folder)
    return folder
