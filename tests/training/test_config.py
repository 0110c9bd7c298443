from __future__ import annotations

import tomllib
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from roundelay.errors import ConfigError
from roundelay.training.config import Config, TaskConfig, with_settings
from roundelay.training.config_table import all_keys, assigned, read, to_toml


@dataclass(frozen=True)
class Settings(TaskConfig):
    width: int = 8
    names: tuple[str, ...] = ("a",)


KIND = with_settings(Settings)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"task": "m:T", "learner": 4}, "unknown key 'learner'; did you mean 'learners'?"),
        ({"task": "m:T", "data": {"bach": 4}}, "unknown key 'data.bach'; did you mean 'data.batch'?"),
        ({"task": "m:T", "learners": "four"}, "learners must be a whole number, got 'four'"),
        ({"task": "m:T", "learners": 2**63}, r"learners must be a whole number below 2\^63, got 9223372036854775808"),
        ({"task": "m:T", "learners": True}, "learners must be a whole number, got True"),
        ({"task": "m:T", "learners": 2.0}, "learners must be a whole number, got 2.0"),
        ({"task": "m:T", "learners": 0}, "learners must be at least 1, got 0"),
        ({"task": "m:T", "budget": {"epochs": float("inf")}}, "budget.epochs must be at least 0 and finite, got inf"),
        ({"task": "m:T", "budget": {"epochs": float("nan")}}, "budget.epochs must be at least 0 and finite, got nan"),
        ({"task": "m:T", "wire": "float64"}, "wire must be one of float32, float16, bfloat16, got 'float64'"),
        ({"task": "m:T", "optimizer": {"momentum": 1}}, "optimizer.momentum must be at least 0 and below 1, got 1"),
        ({"task": "m:T", "data": 3}, "data is a table of settings, got 3"),
        ({"task": "m:T", "optimizer": {"nesterov": 1}}, "optimizer.nesterov must be true or false, got 1"),
        ({"task": "m:T", "settings": {"names": [1]}}, "settings.names must be a list of values, each text, got"),
        ({}, "the key 'task' is missing"),
    ],
)
def test_a_wrong_table_is_refused_with_the_key_what_came_and_what_is_allowed(table, message):
    with pytest.raises(ConfigError, match=message):
        read(KIND, table)


def test_a_whole_number_is_a_number():
    assert read(Config, {"task": "m:T", "budget": {"epochs": 3}}).budget.epochs == 3.0


@pytest.mark.parametrize("key", all_keys(KIND))
def test_every_field_can_be_set_on_the_command_line(key):
    value = read(KIND, {"task": "m:T"})
    for name in key.split("."):
        value = getattr(value, name)
    text = (
        ",".join(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)
    )
    again = read(KIND, assigned(KIND, {"task": "m:T"}, key, text))
    assert again == read(KIND, {"task": "m:T"})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.btch", "unknown key 'data.btch'; did you mean 'data.batch'?"),
        ("data", "data is a table; set one of data.batch, data.sharding, data.workers"),
        ("seed.x", "unknown key 'seed.x'"),
    ],
)
def test_a_wrong_key_on_the_command_line_is_refused(key, message):
    with pytest.raises(ConfigError, match=message):
        assigned(KIND, {}, key, "1")


def test_text_that_is_no_number_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"data.batch must be a whole number, got '1.5'"):
        read(KIND, assigned(KIND, {"task": "m:T"}, "data.batch", "1.5"))


@pytest.mark.parametrize(
    ("text", "names"), [("", ()), ("[]", ()), ("b", ("b",)), ("b,c", ("b", "c")), ("[b, c]", ("b", "c"))]
)
def test_a_list_on_the_command_line_may_have_brackets(text, names):
    assert read(KIND, assigned(KIND, {"task": "m:T"}, "settings.names", text)).settings.names == names


PLAIN = st.one_of(
    st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
NAME = st.text("abcdefghij_", min_size=1, max_size=8)


@given(
    st.dictionaries(NAME, PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(NAME, PLAIN, max_size=3), max_size=5)
)
def test_toml_that_we_write_is_what_we_read(table):
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize("slow", ["0", "x:2", "4:2", "0:0.5", "-1:2", "0:10,9:2", "0:inf", "0:nan"])
def test_a_slow_learner_must_exist_and_be_slower(slow):
    with pytest.raises(ConfigError, match="slow needs LEARNER:FACTOR with a learner below 4"):
        Config("m:T", slow=slow).slowness()
