from __future__ import annotations

import torch
from torch import nn

from roundelay.weights.average import mean_module


def test_weights_are_averaged_and_variances_by_their_second_moments():
    torch.manual_seed(0)
    samples = [torch.randn(1000, 3) * scale + shift for scale, shift in ((1.0, 0.0), (2.0, 5.0))]
    modules = [nn.BatchNorm1d(3, momentum=None) for _ in samples]
    for module, each in zip(modules, samples, strict=True):
        module(each)
    with torch.no_grad():
        modules[1].weight.fill_(3.0)
    mean = mean_module([module.state_dict() for module in modules])
    together = torch.cat(samples).double()
    assert torch.allclose(mean["running_mean"].double(), together.mean(0), atol=1e-5)
    assert torch.allclose(mean["running_var"].double(), together.var(0, correction=0), rtol=2e-3)
    assert torch.equal(mean["weight"], torch.full((3,), 2.0))
    assert mean["num_batches_tracked"] == 1
