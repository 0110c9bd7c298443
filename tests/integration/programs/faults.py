"""A learner process in which learner 2 meets a fault after some steps: faults.py STRATEGY FAULT."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import torch
from torch import nn

import roundelay

STRATEGIES = {
    "adpsgd": lambda n: roundelay.ADPSGD(roundelay.random_ring(n)),
    "dpsgd": lambda n: roundelay.DPSGD(roundelay.random_ring(n)),
    "allreduce": lambda n: roundelay.Allreduce(),
    "delay-by-one": lambda n: roundelay.DelayByOne(),
    "allreduce by gloo": lambda n: roundelay.Allreduce(),
    "super-learners": lambda n: roundelay.SuperLearner(roundelay.ADPSGD(roundelay.random_ring(n // 2)), 2),
}
STEPS, FAULTY, FAULT_AT = 150, 2, 40


def meet(fault: str) -> None:
    print(f"fault at {time.time()}", flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put us in the background
        os.kill(os.getpid(), signal.SIGINT)
    elif fault == "slow":
        time.sleep(8.0)  # longer than any silence that counts as death
    elif fault == "raise":
        raise ValueError("out of data")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    name, fault = sys.argv[1:]
    world = roundelay.init()
    transport = world.transport(share_memory=not name.endswith("by gloo"))
    module = nn.Linear(200, 200)  # large enough to be summed through shared memory
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    try:
        with roundelay.Learner(module, optimizer, STRATEGIES[name](world.size), transport) as learner:
            if fault == "never-starts" and world.rank == FAULTY:
                time.sleep(2.0)  # until all have begun: who gives up before that takes the others with it
                raise ValueError("out of memory")
            for step in range(STEPS):
                module(torch.randn(4, 200)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.01)
                if (world.rank, step) == (FAULTY, FAULT_AT):
                    if fault == "early":
                        break
                    meet(fault)
    except roundelay.PeerLostError as error:
        print(f"lost {error.peer} at {time.time()}", flush=True)
        raise SystemExit(7) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"finished {learner.steps}", flush=True)


if __name__ == "__main__":
    main()
