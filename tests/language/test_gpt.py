"""The model beside a plain implementation of the same equations."""

import math

import pytest
import torch

from roundelay.language.gpt import GPT


def small(**changes):
    torch.manual_seed(0)
    sizes = {"tokens": 11, "context": 8, "layers": 2, "width": 12, "heads": 3} | changes
    return GPT(**sizes).double().eval()


def by_hand(model, tokens):
    """One sequence, one position and one head at a time."""
    x = model.token.weight[tokens] + model.position.weight[: len(tokens)]
    for block in model.blocks:
        heads, size = block.heads, x.shape[1] // block.heads
        attended = torch.zeros_like(x)
        query, key, value = block.attend(block.norm_1(x)).chunk(3, dim=1)
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            for t in range(len(x)):
                scores = torch.stack([query[t, own] @ key[s, own] / math.sqrt(size) for s in range(t + 1)])
                attended[t, own] = scores.softmax(0) @ value[: t + 1, own]
        x = x + block.attended(attended)
        x = x + block.narrow(torch.nn.functional.gelu(block.widen(block.norm_2(x))))
    return model.norm(x) @ model.token.weight.T


def test_the_model_equals_the_equations():
    model, tokens = small(), torch.tensor([3, 1, 4, 1, 5])
    torch.testing.assert_close(model(tokens[None])[0], by_hand(model, tokens), rtol=0, atol=1e-12)


def test_a_prediction_depends_on_earlier_characters_only():
    model, tokens = small(), torch.tensor([[3, 1, 4, 1, 5]])
    changed = tokens.clone()
    changed[0, 3] = 7
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize(("layers", "width", "heads"), [(4, 128, 4), (12, 768, 12)])
def test_the_number_of_parameters(layers, width, heads):
    """12 L C^2 in matrices, 13 L C in biases and norms, and the embeddings."""
    with torch.device("meta"):
        model = GPT(tokens=65, context=128, layers=layers, width=width, heads=heads)
    expected = layers * (12 * width**2 + 13 * width) + (65 + 128) * width + 2 * width
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_an_untrained_model_knows_nothing():
    """Its loss is that of guessing: log of the number of tokens."""
    torch.manual_seed(0)
    model = GPT(tokens=65, context=32, layers=4, width=128, heads=4)
    tokens = torch.randint(65, (16, 33))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(65), abs=0.1)


def test_drawn_characters_follow_the_model_and_the_seed():
    model = small()
    drawn = [model.generate(torch.tensor([2]), 20, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert len(drawn[0]) == 21
    assert drawn[0].tolist() == drawn[1].tolist() != drawn[2].tolist()
    cold = model.generate(torch.tensor([2]), 3, torch.Generator().manual_seed(0), temperature=1e-6)
    for length in (1, 2, 3):
        assert cold[length] == model(cold[None, :length])[0, -1].argmax()


def test_dropout_acts_in_training_only():
    model, tokens = small(dropout=0.5), torch.tensor([[3, 1, 4]])
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
