"""torchrun on four machines: network namespaces with process ids of their own, one agent each. One machine is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from machines import machines

from roundelay.bench.namespaces import Machine

PROGRAM = Path(__file__).parent / "programs" / "machines.py"
MACHINES, LOST = 4, 2
PATIENCE_S = 200.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Agent:
    """torchrun on one machine."""

    def __init__(self, machine: Machine, rank: int, master: str, folder: Path) -> None:
        self.output = folder / f"agent-{rank}.log"
        self.status_file = folder / f"learner-{rank}.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(MACHINES), "--nproc-per-node", "1"]
        where = ["--node-rank", str(rank), "--master-addr", master, "--master-port", "29511"]
        command = machine.command([*torchrun, *where, str(PROGRAM), str(folder / "stop"), str(folder)])
        with self.output.open("w") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def lose(self) -> None:
        """Kill the first process of the machine's own process ids; the kernel then kills all others."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self.process.wait(30)

    def status(self) -> dict:
        return json.loads(self.status_file.read_text()) if self.status_file.exists() else {}

    def end(self) -> None:
        if self.process.poll() is None:
            self.lose()


def wait_until(condition, agents: list[Agent]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "\n".join(agent.output.read_text()[-3000:] for agent in agents)
        time.sleep(0.2)


def test_one_machine_is_lost_and_the_learners_of_the_others_go_on(tmp_path):
    with machines(MACHINES) as hosts, contextlib.ExitStack() as stack:
        agents = [Agent(host, rank, hosts[0].address, tmp_path) for rank, host in enumerate(hosts)]
        for agent in agents:
            stack.callback(agent.end)
        wait_until(lambda: all(agent.status().get("steps", 0) > 20 for agent in agents), agents)
        agents[LOST].lose()
        left = [agent for rank, agent in enumerate(agents) if rank != LOST]
        steps_then = [agent.status()["steps"] for agent in left]
        survivors = [rank for rank in range(MACHINES) if rank != LOST]

        def went_on() -> bool:
            seen = [agent.status() for agent in left]
            moved = all(each["steps"] > then + 50 for each, then in zip(seen, steps_then, strict=True))
            return moved and all(each["members"] == survivors for each in seen)

        wait_until(went_on, left)
        (tmp_path / "stop").touch()
        wait_until(lambda: all("finished" in agent.status() for agent in left), left)
        results = [agent.status() for agent in left]
    assert all(each["local"] == [0, 1, 0] for each in results)  # each machine has its own first GPU
    expected = np.mean([each["own"] for each in results], axis=0)
    for each in results:
        assert each["mean"] == results[0]["mean"]
        np.testing.assert_allclose(each["mean"], expected, rtol=1e-12)
