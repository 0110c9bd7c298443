"""The accelerators of this machine, by torch's device-agnostic API: CUDA, XPU and others."""

from __future__ import annotations

import torch

CPU = "cpu"


def accelerator() -> str:
    """The kind of accelerator that torch can use here, such as "cuda"; "cpu" if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else CPU


def device(local_rank: int) -> torch.device:
    """The accelerator of the learner with this rank on its machine; learners share them in turn. The CPU if there is none."""
    kind = accelerator()
    return torch.device(CPU) if kind == CPU else torch.device(kind, local_rank % torch.accelerator.device_count())


def names() -> list[str]:
    """What the accelerators of this machine are called."""
    kind = accelerator()
    if kind == CPU:
        return []
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    return [name_of(index) for index in range(torch.accelerator.device_count())]
