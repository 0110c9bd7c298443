"""A learner process; in learner 2 a fault happens after some steps. Usage: faults.py STRATEGY FAULT."""

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
    "adpsgd": roundelay.ADPSGD,
    "dpsgd": roundelay.DPSGD,
    "allreduce": roundelay.Allreduce,
    "delay-by-one": roundelay.DelayByOne,
    "super-learners": lambda: roundelay.SuperLearner(roundelay.ADPSGD(), 2),
}
STEPS, FAULTY, FAULT_AT = 150, 2, 40


def cause(fault: str) -> None:
    print(f"fault at {time.time()}", flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore this signal
        os.kill(os.getpid(), signal.SIGINT)
    elif fault == "slow":
        time.sleep(8.0)  # longer than the silence after which a peer is given up
    elif fault == "raise":
        raise ValueError("out of data")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    name, fault = sys.argv[1:]
    world = roundelay.init()
    transport = world.transport()
    module = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    try:
        with roundelay.Learner(module, optimizer, STRATEGIES[name](), transport) as learner:
            if fault == "never-starts" and world.rank == FAULTY:
                time.sleep(2.0)  # until all have started: a learner that fails earlier ends all of them
                raise ValueError("out of memory")
            for step in range(STEPS):
                module(torch.randn(4, 200)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.01)
                if (world.rank, step) == (FAULTY, FAULT_AT):
                    if fault == "early":
                        break
                    cause(fault)
    except roundelay.PeerLostError as error:
        print(f"lost {error.peer} at {time.time()}", flush=True)
        raise SystemExit(7) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"finished {learner.steps}", flush=True)


if __name__ == "__main__":
    main()
