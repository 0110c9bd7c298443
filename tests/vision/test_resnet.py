"""Names, shapes and the forward pass against a second implementation of the published architecture."""

import pytest
import torch
from torch.nn.functional import batch_norm, conv2d, linear, max_pool2d, relu

from roundelay.errors import ConfigError
from roundelay.vision.resnet import IMAGENET_MODELS, fashion_resnet, imagenet_resnet

PARAMETERS = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}  # as torchvision's pages say
BLOCKS = {"resnet18": [2, 2, 2, 2], "resnet34": [3, 4, 6, 3], "resnet50": [3, 4, 6, 3]}


def norm_entries(name, channels):
    vectors = {f"{name}.{each}": (channels,) for each in ("weight", "bias", "running_mean", "running_var")}
    return vectors | {f"{name}.num_batches_tracked": ()}


def conv_entries(conv, norm, out, channels, kernel):
    return {f"{conv}.weight": (out, channels, kernel, kernel)} | norm_entries(norm, out)


def torchvision_entries(model):
    """Names and shapes of a torchvision state_dict, by the rules of its file format."""
    deep = model == "resnet50"
    entries = conv_entries("conv1", "bn1", 64, 3, 7)
    channels = 64
    for group, (blocks, width) in enumerate(zip(BLOCKS[model], [64, 128, 256, 512], strict=True), start=1):
        out = 4 * width if deep else width
        for block in range(blocks):
            at = f"layer{group}.{block}"
            shapes = [(width, channels, 1), (width, width, 3), (out, width, 1)] if deep else [(width, channels, 3)]
            shapes += [] if deep else [(width, width, 3)]
            for number, (to, of, kernel) in enumerate(shapes, start=1):
                entries |= conv_entries(f"{at}.conv{number}", f"{at}.bn{number}", to, of, kernel)
            if block == 0 and (group > 1 or deep):
                entries |= conv_entries(f"{at}.downsample.0", f"{at}.downsample.1", out, channels, 1)
            channels = out
    return entries | {"fc.weight": (1000, channels), "fc.bias": (1000,)}


def checkpoint(model, seed=0):
    """Random weights of plausible size under the names of a torchvision checkpoint."""
    rng = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in torchvision_entries(model).items():
        if name.endswith("num_batches_tracked"):
            state[name] = torch.tensor(7)
        elif name.endswith("running_var") or (name.endswith("weight") and len(shape) == 1):
            state[name] = 0.5 + torch.rand(shape, generator=rng)
        else:
            fan = max(1, torch.Size(shape[1:]).numel())
            state[name] = torch.randn(shape, generator=rng) / fan**0.5
    return state


def functional_logits(state, images, model):
    """The forward pass from a state_dict alone."""

    def norm(x, name):
        parts = [state[f"{name}.{each}"] for each in ("running_mean", "running_var", "weight", "bias")]
        return batch_norm(x, *parts)

    def conv(x, name, stride=1):
        weight = state[f"{name}.weight"]
        return conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = max_pool2d(relu(norm(conv(images, "conv1", 2), "bn1")), 3, 2, 1)
    for group, blocks in enumerate(BLOCKS[model], start=1):
        for block in range(blocks):
            at, stride = f"layer{group}.{block}", 2 if group > 1 and block == 0 else 1
            if model == "resnet50":
                y = relu(norm(conv(x, f"{at}.conv1"), f"{at}.bn1"))
                y = relu(norm(conv(y, f"{at}.conv2", stride), f"{at}.bn2"))
                y = norm(conv(y, f"{at}.conv3"), f"{at}.bn3")
            else:
                y = relu(norm(conv(x, f"{at}.conv1", stride), f"{at}.bn1"))
                y = norm(conv(y, f"{at}.conv2"), f"{at}.bn2")
            if f"{at}.downsample.0.weight" in state:
                x = norm(conv(x, f"{at}.downsample.0", stride), f"{at}.downsample.1")
            x = relu(x + y)
    return linear(x.flatten(2).mean(-1), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize("model", IMAGENET_MODELS)
def test_names_and_shapes_are_torchvisions(model):
    ours = imagenet_resnet(model)
    assert {name: tuple(value.shape) for name, value in ours.state_dict().items()} == torchvision_entries(model)
    assert sum(weight.numel() for weight in ours.parameters()) == PARAMETERS[model]


@pytest.mark.parametrize("model", IMAGENET_MODELS)
@torch.no_grad()
def test_a_torchvision_checkpoint_gives_the_logits_of_an_independent_forward(model):
    state = checkpoint(model)
    ours = imagenet_resnet(model).eval()
    ours.load_state_dict(state)
    images = torch.randn(2, 3, 96, 72, generator=torch.Generator().manual_seed(1))
    expected = functional_logits(state, images, model)
    assert expected.std() > 0.01, "all logits are alike, so that any network would pass"
    torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours.to(memory_format=torch.channels_last)(images), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


@pytest.mark.parametrize("build", [fashion_resnet, lambda: imagenet_resnet("resnet50")], ids=["fashion", "resnet50"])
@torch.no_grad()
def test_every_block_is_at_first_the_identity_of_its_shortcut(build):
    """The last BatchNorm has weight 0, so F(x) = 0 for all x."""
    for block in (m for m in build().modules() if hasattr(m, "residual")):
        channels = block.conv1.weight.shape[1]
        assert block.residual(torch.randn(2, channels, 8, 8)).abs().max() == 0


def test_convolutions_start_with_hes_variance():
    """Std sqrt(2 / fan-out), fan-out = out * kernel^2."""
    torch.manual_seed(0)
    for module in imagenet_resnet("resnet18").modules():
        if isinstance(module, torch.nn.Conv2d):
            out, kernel = module.weight.shape[0], module.weight.shape[-1]
            expected = (2 / (out * kernel**2)) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=5 / (2 * module.weight.numel()) ** 0.5)
            assert module.bias is None


def test_the_small_network_has_the_size_that_its_page_states():
    module = fashion_resnet()
    multiplications = []
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(lambda m, _, out: multiplications.append(out[0].numel() * m.weight[0].numel()))
    assert module.eval()(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    assert sum(weight.numel() for weight in module.parameters()) == 78_010
    first = 16 * 5**2 * 10**2 + 2 * (16 * 16 * 3**2) * 10**2  # 28 pixels at stride 3 leave 10, then 5, then 3
    second = (16 * 32 * 3**2 + 32 * 32 * 3**2 + 16 * 32) * 5**2
    third = (32 * 64 * 3**2 + 64 * 64 * 3**2 + 32 * 64) * 3**2
    assert sum(multiplications) == first + second + third + 64 * 10 == 1_375_936


def test_an_unknown_model_is_refused_with_a_guess():
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        imagenet_resnet("resnet5")
