"""Any bytes at all, where a file of ours is expected: a value or our own error, and nothing of them is ever executed."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import save

from roundelay.errors import CheckpointError, ConfigError, RoundelayError
from roundelay.training import checkpoint, config_table, recipes
from roundelay.training.checkpoint import Checkpoints
from roundelay.training.config import Config
from roundelay.weights import serialization

MANY = settings(max_examples=300)
DEEP = 100_000

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_unpickled_or_executed():
    """The interpreter tells of every attempt; hooks cannot be taken away, so this one sleeps outside of these tests."""
    awake = [True]

    def hook(event, arguments):
        if awake[0] and event in {"pickle.find_class", "os.system", "os.exec", "subprocess.Popen"}:
            raise AssertionError(f"{event} {arguments}")

    sys.addaudithook(hook)
    yield
    awake[0] = False


def written(data: bytes, name: str) -> Path:
    path = Path(tempfile.mkdtemp()) / name
    path.write_bytes(data)
    return path


@st.composite
def altered(draw, whole: bytes):
    """Bytes that are almost a file of ours: cut, repeated or changed in a few places."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(start + 8, len(data))))
        data[start:end] = draw(st.binary(max_size=8))
    return bytes(data)


# Checkpoints -----------------------------------------------------------------------------------------------------------


def safetensors_with(state: str) -> bytes:
    return save({"/x": torch.arange(3.0)}, {"state": state})


def read_state(data: bytes) -> object:
    path = written(data, "learner-0.safetensors")
    try:
        return serialization.read_state(path)
    except CheckpointError:
        return None
    finally:
        path.unlink()
        path.parent.rmdir()


WHOLE = safetensors_with(json.dumps({"pairs": [["x", {"tensor": "/x"}], [3, {"tuple": [1.5, None]}]]}))


@MANY
@given(st.binary(max_size=300) | altered(WHOLE))
@example(b"")
@example(struct.pack("<Q", 2**63) + b"{}")
@example(struct.pack("<Q", 2) + b"{}")
@example(b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
def test_any_bytes_are_a_state_or_a_checkpoint_error(data):
    read_state(data)


@MANY
@given(
    json_values
    | st.recursive(
        json_values | st.just({"tensor": "/x"}),
        lambda inner: (
            st.fixed_dictionaries({"pairs": st.lists(st.tuples(json_values, inner), max_size=3)})
            | st.fixed_dictionaries({"list": st.lists(inner, max_size=3)})
            | st.fixed_dictionaries({"tuple": inner})
        ),
        max_leaves=8,
    )
)
def test_any_description_of_a_state_is_a_state_or_a_checkpoint_error(shape):
    read_state(safetensors_with(json.dumps(shape)))


@pytest.mark.parametrize("state", ["[" * DEEP, '{"list":[' * DEEP, '{"list":[' * 900 + "]}" * 900, "1" * 10_000])
def test_a_description_that_is_too_deep_or_too_long_is_a_checkpoint_error_or_a_state(state):
    read_state(safetensors_with(state))


def manifest(text: bytes) -> None:
    path = written(text, "manifest.json")
    try:
        found = checkpoint._read_manifest(path)
        found.verify()
    except CheckpointError:
        pass
    finally:
        path.unlink()
        path.parent.rmdir()


ENTRY = {"learner": 0, "file": "learner-0.safetensors", "sha256": "00", "bytes": 3}
MANIFEST = {"format": 2, "samples_seen": 12, "files": [ENTRY]}


@MANY
@given(st.binary(max_size=200) | altered(json.dumps(MANIFEST).encode()))
@example(b"[" * DEEP)
@example(b'{"format": 2, "samples_seen": Infinity, "files": []}')
@example(b'{"format": 2, "samples_seen": 1, "files": [{"learner": 1e999, "file": "a", "sha256": ""}]}')
@example(b'{"format": 2, "samples_seen": 1, "files": [{"learner": 1, "file": "a\\u0000b", "sha256": ""}]}')
@example(b'{"format": 2, "samples_seen": 1, "files": [{"learner": 1, "file": "\\ud800", "sha256": ""}]}')
@example(b'{"format": 2, "samples_seen": 1, "files": [{"learner": 1, "file": "", "sha256": ""}]}')
def test_any_bytes_are_a_manifest_or_a_checkpoint_error(text):
    manifest(text)


@MANY
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "format": st.just(1) | json_values,
            "samples_seen": st.integers() | json_values,
            "files": json_values
            | st.lists(
                st.fixed_dictionaries(
                    {"learner": st.integers(0, 3) | json_values, "file": st.text() | json_values, "sha256": json_values}
                ),
                max_size=3,
            ),
        },
    )
)
def test_any_entries_of_a_manifest_are_read_or_refused(entries):
    manifest(json.dumps(entries).encode())


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".hidden", "a/b", ".."])
def test_a_manifest_leads_nowhere_else(name, tmp_path):
    entry = ENTRY | {"file": name}
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST | {"files": [entry]}))
    with pytest.raises(CheckpointError, match="not the name of a file beside the manifest"):
        checkpoint._read_manifest(tmp_path / "manifest.json")


@MANY
@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
@example(b'{"samples_seen": Infinity}')
@example(b"[]")
@example(b'{"samples_seen": null}')
@example(b"[" * DEEP)
def test_any_bytes_are_the_best_place_or_none(data):
    path = written(data, checkpoint.BEST)
    checkpoints = Checkpoints(path.parent, 0, 1)
    place = checkpoints.best()
    checkpoints.close()
    path.unlink()
    path.parent.rmdir()
    assert place is None or isinstance(place, int)


# Configurations --------------------------------------------------------------------------------------------------------

TOML = config_table.to_toml({"task": "m:T", "learners": 4, "data": {"batch": 3}, "optimizer": {"lr": 0.1}}).encode()


@MANY
@given(st.binary(max_size=200) | altered(TOML) | st.text(max_size=100).map(lambda text: text.encode()))
@example(b"a=" + b"[" * DEEP)
@example(b"a=" + b"{a=" * DEEP)
@example(b"a=" + b"1" * 10_000)
@example(b"learners=0x" + b"f" * 10_000)
@example(b'task="m:T"\noptimizer.lr=0x' + b"f" * 10_000)
@example(b'task="m:T"\noptimizer.lr=1' + b"0" * 400)
@example(b"a." * 5000 + b"a=1")
def test_any_bytes_are_a_configuration_or_a_config_error(data):
    path = written(data, "config.toml")
    try:
        config_table.read(Config, recipes.read_toml(path))
    except ConfigError:
        pass
    finally:
        path.unlink()
        path.parent.rmdir()


tables = st.dictionaries(
    st.sampled_from([*Config.__dataclass_fields__, "nonsense"]),
    json_values
    | st.dictionaries(st.sampled_from(["batch", "epochs", "lr", "name", "keep", "workers"]), json_values, max_size=3),
    max_size=5,
)


@MANY
@given(tables)
@example({"task": "m:T", "learners": 10**5000})
@example({"task": "m:T", "optimizer": {"lr": 10**400}})
@example({"task": "m:T", "slow": "0:nan"})
def test_any_table_is_a_configuration_or_a_config_error(table):
    try:
        found = config_table.read(Config, table)
        found.slowness()
    except ConfigError:
        return
    assert config_table.read(Config, recipes.as_table(found)) == found


@MANY
@given(tables, st.sampled_from([4, 6]))
def test_any_settings_of_a_task_are_checked_or_a_config_error(table, learners):
    kept = {key: value for key, value in table.items() if key != "learners"}
    with contextlib.suppress(ConfigError):
        recipes.resolve(kept | {"task": "roundelay.training.tiny:Digits", "learners": learners})


@MANY
@given(st.text(max_size=20))
@example("")
@example(":")
@example(".:x")
@example("..a:x")
@example("a\0b:x")
@example("roundelay:")
@example("roundelay..errors:x")
@example("\ud800:x")
def test_any_text_is_a_task_or_our_own_error(name):
    with pytest.raises(RoundelayError):
        recipes.task_class(name)


@MANY
@given(st.text(max_size=30), st.text(max_size=30))
@example("data.batch", "9" * 5000)
@example("optimizer.lr", "1" + "0" * 400)
@example("optimizer.lr", "nan")
@example("data", "x")
@example("data.batch.more", "x")
def test_any_assignment_is_understood_or_a_config_error(key, text):
    with contextlib.suppress(ConfigError):
        config_table.read(Config, config_table.assigned(Config, {"task": "m:T"}, key, text))
