"""Eight learners that hold different numbers agree on their mean, in one process on a virtual clock.

python examples/01_consensus.py
"""

import torch

import roundelay
from roundelay.clock import VirtualClock
from roundelay.simulation import VirtualLearner, run
from roundelay.transport import SimulatedNetwork

LEARNERS, STEPS = 8, 40


def spread_after(strategy_of, compute_s=lambda rank, step: 1.0):
    """Mean of all learners and their rms distance from it, after STEPS steps of averaging without gradients."""
    clock = VirtualClock()
    network = SimulatedNetwork(clock, LEARNERS, latency_s=0.1)
    learners = []
    for rank in range(LEARNERS):
        module = torch.nn.Linear(1, 1, bias=False).double()
        module.weight.data.fill_(rank)  # learner i holds the number i
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

        def no_gradient(step, module=module):
            module.weight.grad = torch.zeros_like(module.weight)

        learners.append(
            VirtualLearner(
                module,
                optimizer,
                strategy_of(),
                network.transports[rank],
                no_gradient,
                lambda k, rank=rank: compute_s(rank, k),
            )
        )
    run(clock, learners, STEPS)
    values = torch.stack([learner.module.weight.detach().squeeze() for learner in learners])
    return values.mean().item(), values.std(correction=0).item()


if __name__ == "__main__":
    print(f"{'strategy':34}{'mean':>8}{'spread':>12}   (at the start 3.5 and 2.29)")
    for name, strategy_of in {
        "DPSGD, fixed ring": lambda: roundelay.DPSGD("ring"),
        "DPSGD, random ring": lambda: roundelay.DPSGD("random-ring"),
        "DPSGD, one-peer exponential": lambda: roundelay.DPSGD("one-peer-exponential"),
        "ADPSGD, random ring": lambda: roundelay.ADPSGD("random-ring"),
    }.items():
        mean, spread = spread_after(strategy_of)
        print(f"{name:34}{mean:8.4f}{spread:12.2e}")
    mean, spread = spread_after(
        lambda: roundelay.ADPSGD("random-ring"), compute_s=lambda rank, k: 10.0 if rank == 0 else 1.0
    )
    print(f"{'ADPSGD, learner 0 ten times slower':34}{mean:8.4f}{spread:12.2e}")
