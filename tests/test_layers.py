"""What import-linter cannot say: which modules use torch.distributed, and what no code does."""

from __future__ import annotations

import ast
from pathlib import Path

import roundelay
from roundelay.strategies.base import Strategy
from roundelay.strategies.registry import STRATEGIES

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


CHECKERS = {  # of simulated faults: they know what ADPSGD promises of every exchange, and the inside of their own transport
    "simulation/fault_schedule.py",
    "simulation/invariants.py",
    "simulation/elastic_transport.py",
}


def nodes(kind: type[ast.AST]) -> list[tuple[str, ast.AST]]:
    """All nodes of a kind in the source, each with its file and line."""
    return [
        (f"{path.relative_to(SOURCE)}:{node.lineno}", node)
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).as_posix() not in CHECKERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kind)
    ]


def test_no_code_compares_the_name_of_a_strategy():
    """What callers must know of a strategy is an attribute of it, so that a user's own class is as good as ours."""
    names = {*STRATEGIES, *(kind.__name__ for kind in Strategy.__subclasses__())}
    found = [
        where
        for where, node in nodes(ast.Compare)
        if any(isinstance(each, ast.Constant) and each.value in names for each in ast.walk(node))
    ]
    assert found == []


def test_no_code_asks_which_transport_it_has():
    found = [
        where
        for where, node in nodes(ast.Call)
        if ast.unparse(node.func) == "isinstance" and "Transport" in ast.unparse(node.args[1])
    ]
    assert found == []
