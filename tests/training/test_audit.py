from __future__ import annotations

import pytest
import torch

from roundelay.training.audit import Audit


def test_updates_are_what_steps_have_changed_whatever_else_changes_the_weights(tmp_path):
    module = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    audit = Audit(module, optimizer, tmp_path / "chunks.txt")
    with audit.watching(optimizer):
        for _ in range(3):
            module.weight.grad = torch.tensor([[1.0, 3.0]])
            optimizer.step()
            with torch.no_grad():
                module.weight += 10.0  # an exchange
    figures = audit.figures(None)
    assert figures["sum_initial"] == pytest.approx(2.0)
    assert figures["sum_updates"] == pytest.approx(-3 * 0.5 * 4.0)
    assert figures["sum_weights"] == pytest.approx(2.0 - 6.0 + 3 * 20.0)
    for chunk in (4, 7):
        audit.used(chunk)
    audit.close()
    assert (tmp_path / "chunks.txt").read_text() == "4\n7\n"
