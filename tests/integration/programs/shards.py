"""Run with 2 x 2 processes: train the sharded model of support/sharded.py. Results go to the directory given."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import roundelay
from roundelay import learner as learner_module
from roundelay.weights import AcceleratorReplica, whole_state
from roundelay.weights.shards import local

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from adversarial_stream import AdversarialStream
from sharded import HALF, LOCAL_STEPS, NODES, OPTIMIZERS, SHARDS, STEPS, batch, loss, model

WHOLE = StateDictOptions(full_state_dict=True)
STRATEGIES = {
    "dpsgd": roundelay.DPSGD,
    "delay-by-one": roundelay.DelayByOne,
    "delay-by-one-gradients": lambda: roundelay.DelayByOne("gradients"),
    "local-sgd": lambda: roundelay.LocalSGD(every=LOCAL_STEPS),
}


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, ""
        self.mesh = init_device_mesh("cpu", (NODES, SHARDS), mesh_dim_names=("replicate", "shard"))
        self.node, self.shard = (self.mesh.get_local_rank(name) for name in ("replicate", "shard"))

    def sharded(self) -> torch.nn.Module:
        module = model()
        for part in (module.first, module.last, module):
            fully_shard(part, mesh=self.mesh["shard"])
        return module

    def step(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        loss(module, batch(self.node, step).chunk(SHARDS)[self.shard]).backward()
        optimizer.step()

    def save(self, name: str, state: object) -> None:
        """The whole state of this node."""
        whole = whole_state(state)
        if self.shard == 0:
            torch.save(whole, self.folder / f"{self.prefix}{name} {self.node}.pt")

    def train(self, name: str, optimizer_name: str) -> None:
        module = self.sharded()
        optimizer = OPTIMIZERS[optimizer_name](module.parameters())
        with roundelay.Learner(module, optimizer, STRATEGIES[name]()) as learner:
            for step in range(STEPS):
                if step == HALF:
                    self.evaluate(learner, f"{name} {optimizer_name}")
                    self.save_checkpoint(learner, f"checkpoint {name} {optimizer_name}")
                self.step(module, optimizer, step)
            self.save(f"{name} {optimizer_name}", module.state_dict())

    def evaluate(self, learner: roundelay.Learner, name: str) -> None:
        """The mean model in shards, and whole on one process."""
        with learner.consensus() as mean_model, torch.no_grad():
            mean_loss = loss(mean_model, batch(0, 0))
        whole = learner.mean_state_dict()
        assert bool(whole) == (self.node == self.shard == 0)
        self.save(f"mean {name}", {"loss": mean_loss, "whole": whole})

    def save_checkpoint(self, learner: roundelay.Learner, name: str) -> None:
        learner_state = learner.state_dict()
        state = {
            "model": get_model_state_dict(learner.module),
            "optimizer": get_optimizer_state_dict(learner.module, learner.optimizer),
            "learner": learner_state,
        }
        self.save(name, state)

    def resume(self) -> None:
        """Continue each node from a checkpoint that was made without shards."""
        state = torch.load(self.folder / f"unsharded {self.node}.pt", weights_only=True)
        module = self.sharded()
        optimizer = OPTIMIZERS["adamw"](module.parameters())
        set_optimizer_state_dict(module, optimizer, state["optimizer"], options=WHOLE)
        with roundelay.Learner(module, optimizer, roundelay.DPSGD()) as learner:
            set_model_state_dict(module, state["model"], options=WHOLE)
            learner.load_state_dict(state["learner"])
            for step in range(HALF, STEPS):
                self.step(module, optimizer, step)
            assert learner.steps == STEPS
            self.save("resumed", module.state_dict())

    def conserve(self) -> None:
        """ADPSGD while learners step: what each process had, what its own steps added, and what it has."""
        module, lr = self.sharded(), 0.01
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)

        def values(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([local(each).flatten() for each in tensors]).clone()

        weights = list(module.parameters())
        with roundelay.Learner(module, optimizer, roundelay.ADPSGD()) as learner:
            start, added, leads = values(weights), torch.zeros(()), []
            while learner.steps < 200:
                optimizer.zero_grad()
                loss(module, batch(self.node, learner.steps).chunk(SHARDS)[self.shard]).backward()
                added = added - lr * values([weight.grad for weight in weights])
                leads.append(learner.metrics()["lead"])
                optimizer.step()
            with learner.consensus():
                pass  # no learner exchanges any more
        state = {"start": start, "added": added, "end": values(weights), "leads": leads, "figures": learner.metrics()}
        torch.save(state, self.folder / f"{self.prefix}adpsgd {self.node} {self.shard}.pt")

    def leave_one_process_empty(self) -> None:
        """A model of one row: the second process of a node has nothing of it, and takes part all the same."""
        for strategy in (*STRATEGIES.values(), roundelay.ADPSGD):
            module = fully_shard(torch.nn.Linear(6, 1).double(), mesh=self.mesh["shard"])
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            with roundelay.Learner(module, optimizer, strategy()) as learner:
                for step in range(3):
                    self.step(module, optimizer, step)
                learner.finish()
                assert len(learner.mean_state_dict()) == (2 if self.node == self.shard == 0 else 0)


def main() -> None:
    torch.set_num_threads(1)
    program = Program(Path(sys.argv[1]))
    for strategy in STRATEGIES:
        for optimizer in OPTIMIZERS:
            program.train(strategy, optimizer)
    program.resume()
    program.conserve()
    program.leave_one_process_empty()

    # The same on an emulated accelerator, whose copies come late and in any order that is allowed.
    program.prefix = "accelerated "
    learner_module.replica_of = functools.partial(
        AcceleratorReplica, stream=functools.partial(AdversarialStream, seed=1)
    )
    program.train("dpsgd", "adamw")
    program.train("delay-by-one", "adamw")
    program.conserve()


if __name__ == "__main__":
    main()
