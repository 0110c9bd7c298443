"""A GPT on the characters of a text, in a plain PyTorch loop, made decentralised by the lines marked with +.

python examples/04_nanogpt_loop.py shakespeare.txt                                                  # one learner
torchrun --nproc-per-node 4 examples/04_nanogpt_loop.py shakespeare.txt --strategy adpsgd           # asynchronous pairs
torchrun --nproc-per-node 4 examples/04_nanogpt_loop.py shakespeare.txt --strategy local-sgd        # slow links
"""

import argparse
import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import roundelay  # +
from roundelay.language.gpt import GPT

STRATEGIES = {
    "allreduce": roundelay.Allreduce,
    "adpsgd": roundelay.ADPSGD,
    "local-sgd": lambda: roundelay.LocalSGD("random-matching", every=20, compress="int8"),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--strategy", choices=STRATEGIES, default="adpsgd")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)

    text = args.text.read_text()
    characters = sorted(set(text))
    numbers = torch.tensor([characters.index(character) for character in text])
    train, valid = numbers.split([len(numbers) * 9 // 10, len(numbers) - len(numbers) * 9 // 10])
    context, batch = 64, 16

    torch.manual_seed(0)
    model = GPT(tokens=len(characters), context=context, layers=4, width=args.width, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5 + 0.5 * math.cos(math.pi * k / args.steps))

    def loss_of(data, generator, rows=batch):
        starts = torch.randint(len(data) - context - 1, (rows, 1), generator=generator)
        pieces = data[starts + torch.arange(context + 1)]
        return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    world = roundelay.init()  # +
    mine = torch.Generator().manual_seed(world.rank)  # every learner draws other pieces of the text
    with roundelay.Learner(model, optimizer, STRATEGIES[args.strategy](), world.transport()) as learner:  # +
        for _ in range(args.steps):
            loss_of(train, mine).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        learner.finish()  # +
        with learner.consensus(), torch.no_grad():  # +
            loss = loss_of(valid, torch.Generator().manual_seed(0), rows=64).item()
            start = torch.tensor([characters.index("\n")])
            sample = model.generate(start, 200, torch.Generator().manual_seed(0))
    print(f"learner {world.rank}: validation loss of the mean model {loss:.3f}")
    if world.rank == 0:
        print("".join(characters[number] for number in sample))


if __name__ == "__main__":
    main()
