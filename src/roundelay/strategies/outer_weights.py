"""The outer weights of LocalSGD: their step of momentum, and how the module's weights follow them."""

from __future__ import annotations

from typing import Any

import torch

from roundelay.weights import Flat, Replica


class OuterWeights:
    r"""$\phi$, m and y of one learner, in host memory. The caller holds a lock.

    A round is `step`, then the mean of y over the neighbours in `phi`, then `mixed`, then `shift`. The module's weights p change
    in `shift` only; `step` and `mixed` may run in another thread than training.

    Args:
        replica: p.
        lr: $\eta$.
        momentum: $\mu$.

    Attributes:
        phi: the outer weights.
        y: the weights after the learner's own outer step.
    """

    def __init__(self, replica: Replica, lr: float, momentum: float) -> None:
        self._replica, self._lr, self._mu = replica, lr, momentum
        self.phi = Flat(replica.tensors())
        replica.copy_to(self.phi)
        self.y, self._m = Flat(self.phi.views), Flat(self.phi.views)
        # While a round is under way: p when it began. Afterwards: what it adds to p.
        self._base_or_shift = Flat(self.phi.views)
        self._under_way = self._shifted = False

    def step(self) -> None:
        """Delta = p - phi,  m <- mu m + Delta,  y <- phi + eta (mu m + Delta)."""
        y, base = self.y, self._base_or_shift
        self._synchronize()
        self._replica.copy_to(y)
        if self._shifted:  # the module does not have the result of the last round yet
            torch._foreach_add_(y.parts, base.parts)
        self._replica.copy_to(base)
        self._under_way, self._shifted = True, False
        for delta, m, phi in zip(y.parts, self._m.parts, self.phi.parts, strict=True):
            delta.sub_(phi)
            m.mul_(self._mu).add_(delta)
            delta.add_(m, alpha=self._mu).mul_(self._lr).add_(phi)

    def mixed(self) -> None:
        """`phi` has the mean: shift = phi - base brings the module there."""
        for base, phi in zip(self._base_or_shift.parts, self.phi.parts, strict=True):
            base.neg_().add_(phi)
        self._under_way, self._shifted = False, True

    def shift(self, *, moved: bool) -> None:
        """p <- p + (phi - base), if a round has ended. If p has not `moved` since it began, this is phi itself."""
        if self._under_way or not self._shifted:
            return
        self._shifted = False
        if not moved:
            self._replica.copy_from(self.phi)
            return
        weights = self._replica.tensors()
        shifts = zip(self._base_or_shift.views, weights, strict=True)
        torch._foreach_add_(weights, [view.to(weight.device, weight.dtype) for view, weight in shifts])

    def _synchronize(self) -> None:
        """On an accelerator, wait for the last step: a thread of the transport has another stream than the training."""
        device = self._replica.weights[0].device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def state_dict(self) -> dict[str, Any]:
        """Phi and m that match the module's p. The result of a round that p does not have yet is left out."""
        base, phi = self._base_or_shift.parts, [part.clone() for part in self.phi.parts]
        if self._under_way:
            phi = [part.clone() for part in base]
        elif self._shifted:
            torch._foreach_sub_(phi, base)
        return {"outer": phi, "momentum": [part.clone() for part in self._m.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._shifted = False
        for flat, parts in ((self.phi, state["outer"]), (self._m, state["momentum"])):
            for part, saved in zip(flat.parts, parts, strict=True):
                part.copy_(saved)
