"""A model in shards: FSDP2 inside a node, ADPSGD between nodes. The lines marked with + make a plain FSDP2 loop decentralised.

torchrun --nproc-per-node 4 examples/03_fsdp.py --shards 2        # two nodes of two processes, on the digits
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import roundelay  # +


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=2, help="processes that share one replica of the model")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)

    world = roundelay.init()  # +
    nodes = world.size // args.shards
    mesh = init_device_mesh(world.device.type, (nodes, args.shards), mesh_dim_names=("replicate", "shard"))
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=world.device) / 16
    labels = torch.tensor(digits.target, device=world.device)
    mine = torch.arange(world.rank, 1500 // world.size * world.size, world.size)  # equally many images per process

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 129), nn.ReLU(), nn.Linear(129, 10)).to(world.device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])  # inside the node only: learners average between nodes
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_fn = nn.CrossEntropyLoss()

    with roundelay.Learner(model, optimizer, roundelay.ADPSGD()) as learner:  # +
        for epoch in range(args.epochs):
            order = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))]
            for batch in order.split(16):
                loss_fn(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
        learner.finish()  # +
        with learner.consensus() as mean_model, torch.no_grad():  # +  in shards, for an evaluation
            accuracy = (mean_model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        whole = learner.mean_state_dict()  # +  on one process, for a file
    print(f"process {world.rank}: {learner.steps} steps, accuracy of the mean model {accuracy:.1%}")
    if whole:
        print(f"whole model: {sum(value.numel() for value in whole.values())} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
