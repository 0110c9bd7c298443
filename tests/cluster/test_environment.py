import os

import pytest

from roundelay.cluster import environment as environment_module
from roundelay.cluster.environment import World, init
from roundelay.errors import LaunchError
from roundelay.transport.solo import SoloTransport

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_torchrun_this_is_a_world_of_one(environment):
    world = init()
    assert world == World(rank=0, size=1, local_rank=0, local_size=1)
    assert isinstance(world.transport(), SoloTransport)


def test_under_srun_the_error_says_which_variables_to_export(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"})
    with pytest.raises(LaunchError, match=r"no MASTER_ADDR, MASTER_PORT; before srun, export MASTER_ADDR=\$\(scontrol"):
        init()


@pytest.mark.parametrize(
    "given", [{"RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}]
)
def test_an_incomplete_environment_is_an_error_that_names_the_missing_variables(environment, given):
    for name, value in given.items():
        environment.setenv(name, value)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in given]
    with pytest.raises(LaunchError, match=f"no {', '.join(missing)}; start with torchrun"):
        init()


def test_a_loopback_address_is_used_only_if_there_is_no_other(monkeypatch):
    monkeypatch.setattr(environment_module, "_ANY_HOST", "127.0.0.1")
    assert environment_module.address_towards("127.0.0.2") == "127.0.0.1"
    monkeypatch.setattr(environment_module, "_ANY_HOST", "255.255.255.255")  # no route: a broadcast needs permission
    assert environment_module.address_towards("127.0.0.2") == "127.0.0.1"
