"""The acoustic model of the papers: bidirectional LSTMs, a linear bottleneck, and a softmax over the states of the HMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from roundelay.speech.hmm import Floats
from roundelay.training.config import at_least, fraction

FRAMES_AT_ONCE = 8000  # frames of a batch, padding included: enough to keep a processor busy with little memory


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        layers: number of LSTM layers; 6 in the papers.
        width: units of a layer in each direction; 512 in the papers.
        bottleneck: units of the linear layer before the softmax; 256 in the papers.
        dropout: probability, on the output of every layer, during training.
        stack: so many frames are one step of the LSTMs, which then predict the states of all of them; 1 in the papers.
        members: networks of these sizes, trained side by side; the mean of their log probabilities is used. 1 in the papers.
    """

    layers: int = at_least(1, 2)
    width: int = at_least(1, 128)
    bottleneck: int = at_least(1, 64)
    dropout: float = fraction(0.0)
    stack: int = at_least(1, 1)
    members: int = at_least(1, 1)


class AcousticModel(nn.Module):
    """frames → (LSTM →, LSTM ←) × layers → bottleneck → logits of log p(s|x).

    >>> with torch.device("meta"):
    ...     papers = AcousticModel(260, 32_000, ModelConfig(layers=6, width=512, bottleneck=256))
    >>> sum(weight.numel() for weight in papers.parameters())
    43154944
    """

    def __init__(self, features: int, states: int, config: ModelConfig) -> None:
        super().__init__()
        between = config.dropout if config.layers > 1 else 0.0  # torch warns about dropout with a single layer
        self.stack = config.stack
        self.lstm = nn.LSTM(
            config.stack * features, config.width, config.layers, batch_first=True, dropout=between, bidirectional=True
        )
        self.dropout = nn.Dropout(config.dropout)
        self.bottleneck = nn.Linear(2 * config.width, config.stack * config.bottleneck)
        self.output = nn.Linear(config.bottleneck, states)

    @property
    def members(self) -> Sequence[AcousticModel]:
        """The networks that are trained: only this one."""
        return (self,)

    def forward(self, frames_BTF: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """logits_BTS. With `lengths_B`, padding is ignored: the backward LSTM begins at the last frame of each utterance."""
        if lengths_B is None:
            hidden_BUH, _ = self.lstm(stacked(frames_BTF, self.stack))
        else:
            last_B1, time_T = lengths_B[:, None] - 1, torch.arange(frames_BTF.shape[1], device=frames_BTF.device)
            repeated_BT = torch.minimum(time_T, last_B1)  # the last step of an utterance must not see padding either
            steps_BUG = stacked(frames_BTF.take_along_dim(repeated_BT[:, :, None], dim=1), self.stack)
            steps_B = -(-lengths_B.cpu() // self.stack)
            packed = pack_padded_sequence(steps_BUG, steps_B, batch_first=True, enforce_sorted=False)
            hidden_BUH, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        narrow_BUK = self.bottleneck(self.dropout(hidden_BUH))
        narrow_BTK = narrow_BUK.unflatten(2, (self.stack, -1)).flatten(1, 2)[:, : frames_BTF.shape[1]]
        return cast(Tensor, self.output(narrow_BTK))


class Ensemble(nn.Module):
    """Networks that differ in their initial weights and dropout only: log p(s|x) = mean over m of log p_m(s|x) + constant.

    Each network has its own loss (`Speech.loss`), so none relies on the others.
    """

    def __init__(self, features: int, states: int, config: ModelConfig) -> None:
        super().__init__()
        self.stack = config.stack
        self.members = nn.ModuleList(AcousticModel(features, states, config) for _ in range(config.members))

    def forward(self, frames_BTF: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """logits_BTS: the mean of the members' log probabilities."""
        scores = [member(frames_BTF, lengths_B).log_softmax(-1) for member in self.members]
        return torch.stack(scores).mean(0)


def acoustic_model(features: int, states: int, config: ModelConfig) -> AcousticModel | Ensemble:
    """The model of a configuration: one network, or several."""
    return AcousticModel(features, states, config) if config.members == 1 else Ensemble(features, states, config)


def stacked(frames_BTF: Tensor, number: int) -> Tensor:
    """`number` adjacent frames in each step, B×⌈T/number⌉×(number·F). The last frame is repeated to fill the last step.

    >>> stacked(torch.arange(5.0).reshape(1, 5, 1), 2).tolist()
    [[[0.0, 1.0], [2.0, 3.0], [4.0, 4.0]]]
    """
    missing = -frames_BTF.shape[1] % number
    filled_BTF = torch.cat([frames_BTF, frames_BTF[:, -1:].expand(-1, missing, -1)], dim=1) if missing else frames_BTF
    return cast(Tensor, filled_BTF.unflatten(1, (-1, number)).flatten(2))


def log_posteriors(module: AcousticModel | Ensemble, frames: Mapping[str, NDArray[Any]]) -> dict[str, Floats]:
    """log p(s|x) of whole utterances, T×S each, in the order given.

    With stacked frames an utterance can be divided into steps in `module.stack` ways; the mean over all of them is taken.
    """
    batches = _batches_of_like_length({name: len(each) for name, each in frames.items()})
    was_training, threads = module.training, torch.get_num_threads()
    module.eval()
    # Each batch has one thread of its own. Threads that share every step of an LSTM wait for each other after each small step;
    # on a busy machine this took 28 times as long with two threads as with one.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            scored = list(pool.map(lambda names: _scored(module, [frames[name] for name in names]), batches))
    finally:
        torch.set_num_threads(threads)
        module.train(was_training)
    found = {
        name: scores
        for names, batch in zip(batches, scored, strict=True)
        for name, scores in zip(names, batch, strict=True)
    }
    return {name: found[name] for name in frames}


@torch.no_grad()
def _scored(module: AcousticModel | Ensemble, utterances: Sequence[NDArray[Any]]) -> list[Floats]:
    lengths_B = torch.tensor([len(each) for each in utterances])
    arrays = [torch.from_numpy(np.asarray(each, dtype=np.float32)) for each in utterances]
    frames_BTF = pad_sequence(arrays, batch_first=True)
    by_offset = []
    for offset in range(module.stack):
        later_BTF = torch.cat([frames_BTF[:, :1].expand(-1, offset, -1), frames_BTF], dim=1)
        by_offset.append(module(later_BTF, lengths_B + offset)[:, offset:].log_softmax(-1))
    scores_BTS = torch.stack(by_offset).mean(0).log_softmax(-1)
    return [scores_TS[:length].numpy() for scores_TS, length in zip(scores_BTS, lengths_B.tolist(), strict=True)]


def _batches_of_like_length(lengths: Mapping[str, int]) -> list[list[str]]:
    """Names, longest utterance first, in batches of at most FRAMES_AT_ONCE frames with padding, or of one utterance.

    >>> _batches_of_like_length({"a": 5000, "b": 100, "c": 4000})
    [['a'], ['c', 'b']]
    """
    batches: list[list[str]] = []
    for name in sorted(lengths, key=lambda each: -lengths[each]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= FRAMES_AT_ONCE:
            batches[-1].append(name)
        else:
            batches.append([name])
    return batches
