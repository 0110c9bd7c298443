"""Drivers of Ray: ray_runs.py CASE FOLDER prints what the learners have returned, as JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ray
import torch
from torch import nn

import roundelay
from roundelay.integrations.ray import report, run, script

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
QUIET = {"include_dashboard": False, "log_to_driver": True}


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().tolist()


def train(config):
    """Train until the file `stop` is there; every learner pulls towards its own id."""
    torch.manual_seed(int(os.environ["ROUNDELAY_LEARNER"]))
    module = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    node = ray.get_runtime_context().get_node_id()
    with roundelay.Learner(module, optimizer, roundelay.ADPSGD()) as learner:
        own_id = learner.transport.rank
        first, ended = flat(module), Path(config["stop"])
        while not ended.exists() and learner.steps < config.get("steps", 10**9):
            (module(torch.randn(8, 3, dtype=torch.float64)) - own_id).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            if learner.steps % 20 == 0:
                figures = {"pid": os.getpid(), "node": node, "joined": learner.joined, "members": learner.members}
                report(learner.metrics() | figures)
        learner.finish()
        own = learner.strategy.weights().parts[0].tolist()
        with learner.consensus() as mean_model:
            mean = flat(mean_model)
    result = {"own": own, "mean": mean, "first": first}
    return result | {"pid": os.getpid(), "node": node, "joined": learner.joined, "steps": learner.steps}


def raises_in_one():
    with roundelay.Learner(*small(), roundelay.ADPSGD()) as learner:
        report({"here": True})
        if learner.transport.rank == 1:
            raise ValueError("as planned")
    return learner.transport.rank


def raises_in_all():
    raise ValueError("as planned")


def small():
    module = nn.Linear(2, 2)
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def simple():
    """One node: results and reports come back, and an exception in one learner ends that learner only."""
    ray.init(num_cpus=3, **QUIET)
    reports = []
    config = {"stop": str(FOLDER / "stop"), "steps": 60}
    results = run(
        train, config, learners=2, open_collectives=True, on_report=lambda i, figures: reports.append((i, figures))
    )
    (FOLDER / "script.py").write_text(
        "import sys, roundelay\nassert sys.argv[1:] == ['--x']\nroundelay.init().close()\n"
    )
    scripted = run(script(str(FOLDER / "script.py"), ["--x"]), learners=2)
    example = Path(__file__).parents[3] / "examples" / "05_elastic_loop.py"
    run(script(str(example)), learners=2, open_collectives=True)
    one = run(raises_in_one, learners=2)
    try:
        run(raises_in_all, learners=2)
        raised = ""
    except ray.exceptions.RayTaskError as error:
        raised = str(error)
    return {"results": results, "reports": reports, "scripted": scripted, "one": one, "raised": raised}


class Faults:
    """Kills the process of learner 1 once all train, then removes a node that is not the driver's, then ends the run."""

    def __init__(self, cluster, workers):
        self.cluster, self.workers = cluster, workers
        self.newest, self.first = {}, {}
        self.killed = self.removed_node = None
        self.removed = []

    def __call__(self, learner, figures):
        self.newest[learner] = figures
        self.first.setdefault(learner, figures)
        (FOLDER / "newest.json").write_text(json.dumps({"removed": self.removed_node} | self.newest))
        if len(self.newest) < 4:
            return
        if self.killed is None:
            self.killed = self.newest[1]["pid"]
            os.kill(self.killed, signal.SIGKILL)
        elif self.removed_node is None and self.newest[1]["joined"] and self.all_here():
            self.remove_a_node()
        elif self.removed_node is not None and self.all_here():
            (FOLDER / "stop").touch()

    def all_here(self):
        """Whether all learners have a process on a living node, and know of each other."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {self.removed_node}
        return all(each["node"] in alive and len(each["members"]) == 4 for each in self.newest.values())

    def remove_a_node(self):
        self.before = dict(self.newest)
        worker = next(each for each in self.workers if any(each.node_id == one["node"] for one in self.newest.values()))
        self.removed_node = worker.node_id
        self.removed = [learner for learner, one in self.newest.items() if one["node"] == worker.node_id]
        self.cluster.remove_node(worker, allow_graceful=False)


def faults():
    """Three nodes, four learners."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    workers = [cluster.add_node(num_cpus=2) for _ in range(2)]
    ray.init(address=cluster.address)
    chaos = Faults(cluster, workers)
    results = run(train, {"stop": str(FOLDER / "stop")}, learners=4, open_collectives=True, on_report=chaos)
    told = {"results": results, "killed": chaos.killed, "removed": chaos.removed, "removed_node": chaos.removed_node}
    told |= {"first": chaos.first, "before": chaos.before, "nodes": [node.node_id for node in workers]}
    ray.shutdown()
    cluster.shutdown()
    return told


def inside_torch_trainer():
    """TorchTrainer sets RANK and forms the process group: init() uses both, and prepare_model's DDP is refused."""
    import ray.train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    def loop():
        module, optimizer = small()
        wrapped = prepare_model(module)
        try:
            roundelay.Learner(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), roundelay.ADPSGD())
            refused = ""
        except roundelay.errors.StrategyError as error:
            refused = str(error)
        del wrapped
        module, optimizer = small()
        with roundelay.Learner(module, optimizer, roundelay.DPSGD()) as learner:
            for _ in range(10):
                module(torch.randn(4, 2)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with learner.consensus() as mean_model:
                mean = flat(mean_model)
            told = {
                "rank": learner.transport.rank,
                "size": learner.transport.size,
                "steps": learner.steps,
                "mean": mean,
                "refused": refused,
            }
        (Path(FOLDER) / f"{told['rank']}.json").write_text(json.dumps(told))
        ray.train.report({"steps": learner.steps})

    ray.init(num_cpus=3, **QUIET)
    trainer = TorchTrainer(
        loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=str(FOLDER))
    )
    trainer.fit()
    return {"learners": [json.loads((FOLDER / f"{i}.json").read_text()) for i in range(2)]}


if __name__ == "__main__":
    told = {"simple": simple, "faults": faults, "trainer": inside_torch_trainer}[sys.argv[1]]()
    print("\nRESULT " + json.dumps(told))
