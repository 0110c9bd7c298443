"""deploy/slurm/*.sbatch on a real Slurm: one slurmctld and three slurmd on this host. Needs root and Debian's slurm-wlm."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "deploy" / "slurm"
NODES = 3
PATIENCE_S = 240.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("slurmd") is None, reason="needs slurmd: apt-get install slurm-wlm"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start slurmd"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
GresTypes=gpu
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=128 RealMemory=1000 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Slurm daemons of its own, whose files are all in one folder. Names of nodes lead to the loopback, inside of jobs only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(NODES + 1)
        text = CONFIGURATION.format(
            folder=folder,
            host=platform.node(),
            port=ports,
            last=NODES - 1,
            first_port=ports + 1,
            last_port=ports + NODES,
        )
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-3]\n")  # any four devices; nothing opens them
        nodes = "".join(f"127.0.0.1 n{number}\n" for number in range(NODES))
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + nodes)
        binaries = Path(sys.executable).parent
        variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{binaries}:{os.environ['PATH']}"}
        self.environment = (
            os.environ | variables | {"ROUNDELAY_HERE": "1", "ROUNDELAY_SECRET_FILE": str(folder / "secret")}
        )
        (folder / "secret").write_text("5a" * 32)
        hosts = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N $0"
        self._daemons = [self._start(["slurmctld", "-D"])]
        self._daemons += [self._start(["unshare", "--mount", "sh", "-c", hosts, f"n{i}"]) for i in range(NODES)]
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%D %t") == f"{NODES} idle")

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=self.environment, cwd=self.folder, start_new_session=True, **quiet)

    def run(self, *command: str) -> str:
        ended = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        return (ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr).strip()

    def submit(self, script: str, *words: str) -> str:
        small = ["--ntasks-per-node", "1", "--cpus-per-task", "1", "--nodes", str(NODES)]
        said = self.run("sbatch", "--parsable", *small, str(SLURM / script), *words)
        assert said.isdecimal(), said
        return said

    def state(self, job: str) -> str:
        fields = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job).split())
        return fields.get("JobState", "")

    def log(self, job: str) -> str:
        path = self.folder / f"roundelay-{job}.log"
        return path.read_text() if path.exists() else ""

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-n", node, "-o", "%T")

    def wait_until(self, condition, job: str = "") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() >= deadline or (job and self.state(job) == "FAILED"):
                state = self.run("squeue") + "\n" + self.run("sinfo", "-N", "-l")
                pytest.fail(f"{state}\n{self.log(job)[-5000:]}")
            time.sleep(0.5)

    def close(self) -> None:
        self.run("scancel", "--full", "--signal=KILL", "-u", "root")
        self.run("scancel", "-u", "root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(PATIENCE_S)


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    for first in range(16900, 19000, count):
        sockets = []
        try:
            sockets = [socket.create_server(("127.0.0.1", first + number)) for number in range(count)]
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        if len(sockets) == count:
            return first
    raise OSError("no free ports")


def rows(run: Path) -> list[dict]:
    lines = [line for path in sorted(run.glob("metrics*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def trains(run: Path) -> bool:
    return any(row.get("steps", 0) > 20 for row in rows(run))


def test_a_job_is_told_to_stop_is_saved_and_requeued_and_trains_to_the_end(cluster):
    run = cluster.folder / "run"
    job = cluster.submit("train.sbatch", "tiny", "--epochs", "400", "--out", str(run))
    cluster.wait_until(lambda: trains(run), job)
    cluster.run("scancel", "--batch", "--signal=TERM", job)  # what --signal=B:TERM@120 does before the time limit
    cluster.wait_until(lambda: "stopped and saved" in cluster.log(job), job)
    cluster.wait_until(lambda: cluster.state(job) == "PENDING", job)
    assert not (run / "results.json").exists()
    assert list((run / "checkpoints").iterdir())
    # Slurm waits two minutes before it starts a job again. slurmd refuses the job only within the second in which it ended.
    time.sleep(3)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    cluster.wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), job)
    assert cluster.state(job) == "COMPLETED", cluster.log(job)
    assert (run / "results.json").is_file()
    assert (run / "model.safetensors").is_file()


def test_a_node_is_drained_and_another_is_lost_and_the_other_learners_train_to_the_end(cluster):
    run = cluster.folder / "run"
    words = ["tiny", "--learners", str(NODES), "--strategy", "adpsgd", "--epochs", "400", "--out", str(run)]
    job = cluster.submit("elastic.sbatch", *words)
    cluster.wait_until(lambda: trains(run), job)
    cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    cluster.wait_until(lambda: ": died (" in cluster.log(job), job)
    assert cluster.node_state("n1") == "draining"  # its learner goes on
    cluster.wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED", "NODE_FAIL"), job)
    assert (run / "results.json").is_file(), cluster.log(job)
    assert cluster.state(job) == "COMPLETED", cluster.log(job)
    cluster.wait_until(lambda: cluster.node_state("n1") == "drained")
    assert cluster.log(job).count(": died (") == 1


def test_the_elastic_loop_runs_unchanged_as_tasks_of_srun(cluster):
    """As the page about clusters says: srun starts one task per learner, and the script sets only the address of the first."""
    example = Path(__file__).parents[2] / "examples" / "05_elastic_loop.py"
    script = cluster.folder / "loop.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=roundelay-%j.log\n"
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500\n'
        f"srun python {example}\n"
    )
    small = ["--ntasks-per-node", "1", "--cpus-per-task", "1", "--nodes", str(NODES)]
    job = cluster.run("sbatch", "--parsable", *small, str(script))
    cluster.wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), job)
    assert cluster.state(job) == "COMPLETED", cluster.log(job)
    accuracies = re.findall(r"mean model: accuracy ([\d.]+)", cluster.log(job))
    assert len(accuracies) == NODES
    assert len(set(accuracies)) == 1
    assert float(accuracies[0]) > 0.95
