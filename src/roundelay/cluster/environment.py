"""The world that a process starts in: a ticket, torchrun's or Slurm's variables, a process group, or one process alone."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from roundelay import devices
from roundelay.cluster.membership import Address
from roundelay.errors import LaunchError
from roundelay.transport.base import Transport
from roundelay.transport.collectives import NEVER, ProcessGroupCollectives, backends
from roundelay.transport.handshake import this_host
from roundelay.transport.security import Security
from roundelay.transport.solo import SoloTransport
from roundelay.transport.tcp import TcpTransport

if TYPE_CHECKING:
    from roundelay.cluster.endpoint import Endpoint
    from roundelay.cluster.rendezvous.client import RendezvousClient

LOOPBACK = "127.0.0.1"

_ADDRESS_BYTES = 64
_SECRET_BYTES = 32
_HOST_BYTES = 16
_NODE_BYTES = 64
_ANY_HOST = "192.0.2.1"  # an address reserved for documentation (RFC 5737): packets to it take the default route
_STORE_TIMEOUT = datetime.timedelta(minutes=5)


# Variables of launchers that start several processes and do not set RANK and WORLD_SIZE.
_OTHER_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "MV2_COMM_WORLD_SIZE")
_MASTER_UNDER_SLURM = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500'


class StepCount:
    """What `ElasticSampler` must know of the steps of the learner of a world.

    Attributes:
        taken: steps so far.
        together: a step waits for other learners, so no learner may stop taking part and wait for the rest of the batches.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.together = False


@dataclass(frozen=True)
class World:
    """This learner's rank, and the number of learners.

    Attributes:
        rank: this learner, 0 .. size-1. In an elastic run its id, which stays when others come and go.
        size: number of learners in the run; in an elastic run, of those that begin together.
        local_rank: rank of this learner among those of its machine.
        local_size: number of learners on this machine; the natural size of a super-learner.
        ranks: torch's ranks of these learners; empty if every process of torch's world is one of them.
        group: the process group of these learners, if only they call `init`; None means torch's whole world.
        client: the connection to the rendezvous of an elastic run, in which learners may come and go; else None.
        endpoint: connects to the learners of an elastic run; else None.
        steps: counts the steps that the learner of this world has taken.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    ranks: tuple[int, ...] = field(default=(), repr=False)
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    client: RendezvousClient | None = field(default=None, repr=False, compare=False)
    endpoint: Endpoint | None = field(default=None, repr=False, compare=False)
    steps: StepCount = field(default_factory=StepCount, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The accelerator of this learner, or the CPU if there is none."""
        return devices.device(self.local_rank)

    def transport(self, *, share_memory: bool = True) -> Transport:
        """Connect to all peers. This is a collective call, because it gathers addresses: all learners must make it.

        Args:
            share_memory: exchange through shared memory, not sockets, with learners of the same machine.
        """
        if self.size == 1:
            return SoloTransport()
        one_machine = len(set(self._gather(this_host(), _HOST_BYTES))) == 1
        host = LOOPBACK if one_machine else address_towards(os.environ.get("MASTER_ADDR", _ANY_HOST))
        listener = socket.create_server((host, 0), backlog=self.size + 16)
        drawn = self._gather(secrets.token_bytes(_SECRET_BYTES), _SECRET_BYTES)[0]
        mine = f"{host}:{listener.getsockname()[1]}".encode()
        texts = [text.rstrip(b"\0").decode() for text in self._gather(mine, _ADDRESS_BYTES)]
        transport = TcpTransport(
            self.rank,
            self.size,
            listener,
            Security.from_environment() or Security(drawn),
            ProcessGroupCollectives(lambda members: transport.hopeless(members), self.ranks),  # noqa: PLW0108  # made below
            share_memory=share_memory,
            local_size=self.local_size,
        )
        transport.connect({peer: parsed_address(text) for peer, text in enumerate(texts) if peer != self.rank})
        return transport

    def close(self, failure: str = "") -> None:
        """Leave an elastic run; a Learner does so when it is closed. With a `failure`, the other learners are told."""
        if self.client is not None and self.endpoint is not None:
            self.client.close(failure)
            self.endpoint.close()

    def between_nodes(self, node: Sequence[int]) -> World:
        """The world of the processes that hold the same shard as this one: its learners are the nodes.

        All processes must call this, because it gathers the nodes.

        Args:
            node: torch's ranks of the processes that hold one replica in shards, in the order of their shards.

        Raises LaunchError if nodes differ in their number of shards, or if their ranks are not in order.
        """
        mine = f"{node[0]} {node.index(self.rank)} {len(node)}"
        found = [tuple(map(int, text.rstrip(b"\0").split())) for text in gather_bytes(mine.encode(), _NODE_BYTES)]
        nodes = sorted({first for first, _, _ in found})
        place = {(first, index): rank for rank, (first, index, _) in enumerate(found)}
        ranks = tuple(place.get((first, node.index(self.rank)), -1) for first in nodes)
        if len({shards for _, _, shards in found}) > 1 or list(ranks) != sorted(ranks):
            raise LaunchError(
                "the processes do not form a mesh of nodes by shards: every node must have the same number of shards, and "
                "the ranks of a shard must ascend; use the rows of one "
                'init_device_mesh(device, (nodes, shards), mesh_dim_names=("replicate", "shard"))'
            )
        hosts = gather_bytes(this_host(), _HOST_BYTES)
        local_size = sum(hosts[rank] == hosts[self.rank] for rank in ranks)
        return replace(self, rank=ranks.index(self.rank), size=len(ranks), local_size=local_size, ranks=ranks)

    def _gather(self, mine: bytes, width: int) -> list[bytes]:
        """Gather the bytes of this world's learners. All processes of the group, or of torch's world, must call this."""
        gathered = gather_bytes(mine, width, self.group)
        if self.group is not None:
            return gathered
        return [gathered[rank] for rank in self.ranks] if self.ranks else gathered


_joined: World | None = None  # the elastic run that this process takes part in


def init(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    timeout: datetime.timedelta | None = None,
    group: dist.ProcessGroup | None = None,
) -> World:
    """Take part in the run that the environment or the arguments describe. A process takes part in one elastic run at a time.

    Without arguments: the elastic run that ROUNDELAY_TICKET names (see `join`); a process group that is initialised; the
    variables of torchrun or another launcher that sets RANK and WORLD_SIZE; Slurm's variables. Without any of them the
    world has one learner. This initialises the process group if the caller has not done so.

    Args:
        rank: this learner, if no launcher tells it. Needs `size`, and `address` unless `size` is 1.
        size: number of learners.
        address: HOST:PORT at which learner 0 listens.
        timeout: how long to wait for the other learners while the process group forms; by default torch's.
        group: the learners are the processes of this group, such as one dimension of a device mesh.

    Raises LaunchError if a variable or an argument is missing, if the process group has no backend for CPU tensors, or if
    this process seems to be one of several whose launcher is not known.

    >>> init()
    World(rank=0, size=1, local_rank=0, local_size=1)
    """
    if group is not None:
        return _world_of(group)
    if rank is not None or size is not None:
        return _explicit(rank, size, address, timeout)
    if "ROUNDELAY_TICKET" in os.environ:
        return joined()
    if not dist.is_initialized():
        adopt_slurm()
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            _refuse_unknown_launchers()
            return World(0, 1, 0, 1)
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            advice = "start with torchrun, or unset RANK and WORLD_SIZE"
            if "SLURM_PROCID" in os.environ:
                advice = f"before srun, export {_MASTER_UNDER_SLURM}"
            raise LaunchError(f"the environment has no {', '.join(missing)}; {advice}")
        dist.init_process_group(_backend(), timeout=timeout or NEVER)
    return _torch_world()


def joined() -> World:
    """The elastic run of this process; joins the one that ROUNDELAY_TICKET names if there is none yet."""
    global _joined  # noqa: PLW0603 - like torch's default process group
    if _joined is None or _joined.client is None or _joined.client.closed:
        from roundelay.cluster.elastic_world import join, join_next_run

        finished = _joined is not None and _joined.client is not None and not _joined.client.failed
        _joined = join_next_run() if finished else join()
    return _joined


def _explicit(rank: int | None, size: int | None, address: str | None, timeout: datetime.timedelta | None) -> World:
    if rank is None or size is None or not 0 <= rank < size:
        raise LaunchError(f"init needs rank and size with 0 <= rank < size, got rank={rank} and size={size}")
    if size == 1:
        return World(0, 1, 0, 1)
    if address is None:
        raise LaunchError("init needs address='HOST:PORT', where learner 0 listens, besides rank and size")
    host, port = parsed_address(address)
    dist.init_process_group(
        _backend(), init_method=f"tcp://{host}:{port}", rank=rank, world_size=size, timeout=timeout or NEVER
    )
    return _torch_world()


def _world_of(group: dist.ProcessGroup) -> World:
    """The processes of a group are the learners."""
    ranks = tuple(dist.get_process_group_ranks(group))
    hosts = gather_bytes(this_host(), _HOST_BYTES, group)
    own = dist.get_rank(group)
    return World(own, len(ranks), hosts[:own].count(hosts[own]), hosts.count(hosts[own]), ranks, group)


def _backend() -> str:
    return backends(devices.accelerator())


def _torch_world() -> World:
    if "cpu:" not in dist.get_backend_config():
        raise LaunchError(
            f"the process group has no backend for CPU tensors, only {dist.get_backend_config()}; initialise it with "
            "'cpu:gloo,cuda:nccl', or leave that to roundelay.init()"
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return World(rank, size, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    hosts = gather_bytes(this_host(), _HOST_BYTES)
    return World(rank, size, local_rank=hosts[:rank].count(hosts[rank]), local_size=hosts.count(hosts[rank]))


def _refuse_unknown_launchers() -> None:
    """Raise LaunchError if this process seems to be one of several, because each would train alone."""
    advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or ROUNDELAY_TICKET, or call init(rank=0, size=1) to train alone"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise LaunchError(
            f"this process runs inside Ray, and nothing says which learner it is: use roundelay.integrations.ray.run, or {advice}"
        )
    for name in _OTHER_LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            raise LaunchError(f"{name} is {os.environ[name]}, but nothing says which learner this process is: {advice}")


def adopt_slurm() -> None:
    """Under `srun` without torchrun, set RANK, WORLD_SIZE and the LOCAL_ variables from Slurm's; not MASTER_ADDR."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) < 2:
        return
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
    if "SLURM_LOCALID" in os.environ and "SLURM_NTASKS_PER_NODE" in os.environ:
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["SLURM_NTASKS_PER_NODE"]


def parsed_address(text: str) -> Address:
    """Parse HOST:PORT. Raises LaunchError for anything else.

    >>> parsed_address("10.0.0.1:29400")
    ('10.0.0.1', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise LaunchError(f"an address is HOST:PORT, such as 10.0.0.1:29400, got '{text}'")
    return host, int(port)


def host_store(host: str) -> tuple[object, Address]:
    """Open a store through which process groups form. Returns the store, which must be kept, and its address.

    The process of the supervisor or of the rendezvous calls this, because a store in learner 0 would die with that
    learner. The store has no authentication.
    """
    listener = socket.create_server((host, 0))  # without a socket given, a store listens on all interfaces
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, (host, port)


def joined_store(address: Address) -> object:
    """Connect to the store at `address`."""
    host, port = address
    return dist.TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)  # type: ignore[attr-defined]


def form_process_group(world: World, backend: str, timeout: datetime.timedelta | None = None) -> None:
    """Form torch's default process group with the learners that begin an elastic run. Does nothing if there is a group.

    Learners that are lost stay in the group, and learners that join are not in it.

    Raises LaunchError if the rendezvous does not allow collectives, which have no authentication.
    """
    assert world.client is not None
    assert world.client.view is not None
    if dist.is_initialized():
        return
    address = world.client.ask_for_info().get("store")
    if address is None:
        raise LaunchError(
            "torch's process group has no authentication, and the rendezvous does not allow it: start the rendezvous with "
            "open_collectives=True (--open-collectives) in a network that you trust"
        )
    # A rendezvous serves one run after the other, and their generations differ.
    name = f"default_process_group/{world.client.view.membership.generation}"
    store = dist.PrefixStore(name, joined_store(tuple(address)))  # type: ignore[arg-type,attr-defined]
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout or NEVER)


def gather_bytes(mine: bytes, width: int, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gather the bytes of all processes (of the group), padded to `width`, in order of rank.

    This sends tensors, because `all_gather_object` would unpickle what other processes send.
    """
    padded = torch.tensor(list(mine.ljust(width, b"\0")), dtype=torch.uint8)
    gathered: list[Tensor] = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(row.tolist()) for row in gathered]


def address_towards(host: str) -> str:
    """The address of the interface that leads to `host`. No packet is sent.

    On `host` itself this may be a loopback address (Debian's 127.0.1.1), which other machines cannot reach. Then
    this returns the address of the interface of the default route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address = str(probe.getsockname()[0])
    if address.startswith("127.") and host != _ANY_HOST:
        with contextlib.suppress(OSError):  # without a network all learners are on this machine
            return address_towards(_ANY_HOST)
    return address
