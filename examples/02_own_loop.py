"""A plain PyTorch loop on handwritten digits, made decentralised by the lines marked with +.

python examples/02_own_loop.py                                                      # one learner
torchrun --nproc-per-node 4 examples/02_own_loop.py --strategy adpsgd               # four learners
torchrun --nproc-per-node 4 examples/02_own_loop.py --strategy adpsgd --slow 0:10   # learner 0 is ten times slower
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import roundelay  # +

STRATEGIES = {
    "allreduce": roundelay.Allreduce,
    "dpsgd-ring": lambda: roundelay.DPSGD("ring"),
    "dpsgd": lambda: roundelay.DPSGD("random-ring"),
    "adpsgd-ring": lambda: roundelay.ADPSGD("ring"),
    "adpsgd": lambda: roundelay.ADPSGD("random-ring"),
    "delay-by-one": roundelay.DelayByOne,
    "super-learner": lambda: roundelay.SuperLearner(roundelay.ADPSGD("ring"), group_size=2),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=STRATEGIES, default="adpsgd")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--slow", default="0:1", metavar="LEARNER:FACTOR")
    args = parser.parse_args()
    torch.set_num_threads(1)

    world = roundelay.init()  # +
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)
    mine = range(world.rank, 1500, world.size)  # the part of the data that this learner trains on

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    slow_learner, factor = args.slow.split(":")
    pause_s = 0.002 * (float(factor) if int(slow_learner) == world.rank else 1.0)

    strategy = STRATEGIES[args.strategy]()  # +
    began = time.perf_counter()
    with roundelay.Learner(model, optimizer, strategy, world.transport()) as learner:  # +
        for epoch in range(args.epochs):
            order = torch.tensor(mine)[torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))]
            for batch in order.split(16):
                loss = loss_fn(model(images[train][batch]), labels[train][batch])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(pause_s)  # as if the model were larger
        seconds = time.perf_counter() - began

        learner.finish()  # +
        with learner.consensus() as mean_model, torch.no_grad():  # +
            accuracy = (mean_model(images[test]).argmax(1) == labels[test]).float().mean().item()
    print(
        f"learner {world.rank}: {learner.steps} steps in {seconds:.2f} s, loss {loss.item():.4f}, "
        f"accuracy of the mean model {accuracy:.1%}"
    )


if __name__ == "__main__":
    main()
