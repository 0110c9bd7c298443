"""What import-linter cannot say: torch.distributed is touched in a few places, and by the benchmarks, whose rival it is."""

from __future__ import annotations

import ast
from pathlib import Path

import roundelay

SOURCE = Path(roundelay.__file__).parent
ALLOWED = {
    "checks.py",
    "cluster/environment.py",
    "transport/collectives.py",
    "weights/shards.py",
    "integrations/accelerate.py",
    "bench/accelerator_worker.py",
    "bench/cases.py",
    "bench/network_worker.py",
    "bench/worker.py",
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_few_modules_touch_torch_distributed():
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(name.startswith(("torch.distributed", "torch.nn.parallel")) for name in imports(path))
    }
    assert users == ALLOWED
