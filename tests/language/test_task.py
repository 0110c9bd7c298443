import math

import pytest
import torch

from roundelay.errors import ConfigError, DataError
from roundelay.language.gpt import GPT
from roundelay.language.task import Characters, CharactersConfig
from roundelay.language.text import Text, find_text, read_text
from roundelay.simulation.compute import constant
from roundelay.simulation.network import Links
from roundelay.simulation.recipe import SimulatedRun
from roundelay.training import run_directory
from roundelay.training.recipe_files import built_in
from roundelay.training.recipes import resolve, table_of

TEXT = "the quick brown fox jumps over the lazy dog. " * 100


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "shakespeare.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def task(text_file):
    return Characters(CharactersConfig(str(text_file), layers=1, width=16, heads=2, context=16), seed=0)


def test_text_becomes_numbers_and_back():
    text = Text.of(TEXT)
    whole = torch.cat([text.splits[split] for split in ("train", "valid", "test")])
    assert text.decode(whole) == TEXT
    assert text.decode(text.encode("fox")) == "fox"
    assert len(text.splits["valid"]) == len(text.splits["test"]) == len(TEXT) // 20


def test_a_folder_or_the_variable_names_the_text(text_file, monkeypatch):
    assert find_text(str(text_file.parent)) == find_text(str(text_file)) == text_file
    monkeypatch.setenv("ROUNDELAY_DATA", str(text_file.parent))
    assert find_text("") == text_file
    monkeypatch.delenv("ROUNDELAY_DATA")
    with pytest.raises(DataError, match="name a text file by --data"):
        find_text("")
    with pytest.raises(DataError, match="there is no text file"):
        find_text(str(text_file) + "x")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="as UTF-8 text"):
        read_text(str(tmp_path / "noise"))


def test_samples_are_pieces_of_the_training_text_near_their_place(task):
    batch = task.batch(range(len(task)), torch.Generator().manual_seed(0))
    train = task.text.decode(task.text.splits["train"])
    assert batch.shape == (len(task), 17)
    for number, piece in enumerate(batch):
        start = train.find(task.text.decode(piece), max(0, number * 16 - 17))
        assert start <= number * 16 + 16
    again = task.batch(range(len(task)), torch.Generator().manual_seed(0))
    assert torch.equal(batch, again)


def test_evaluation_counts_every_character_of_a_split_once(task):
    module = task.module().eval()
    numbers = task.text.splits["valid"]
    pieces = (len(numbers) - 1) // 16
    with torch.no_grad():
        parts = [task.evaluate(module, "valid", part, 3) for part in range(3)]
        exact = [
            float(torch.nn.functional.cross_entropy(module(numbers[None, s : s + 16])[0], numbers[s + 1 : s + 17]))
            for s in range(0, 16 * pieces, 16)
        ]
    assert sum(part["samples"] for part in parts) == pieces
    assert sum(part["loss"] for part in parts) == pytest.approx(sum(exact), rel=1e-5)


def test_matrices_decay_and_the_rest_does_not(task):
    decayed, rest = task.parameter_groups(task.module())
    assert all(weight.dim() == 2 for weight in decayed["params"])
    assert all(weight.dim() == 1 for weight in rest["params"])
    assert rest["weight_decay"] == 0.0


def test_weights_depend_on_the_seed_only(task):
    assert torch.equal(task.module().token.weight, task.module().token.weight)


@pytest.mark.parametrize(
    ("settings", "message"), [({"width": 10, "heads": 4}, "must be a multiple"), ({"context": 0}, "at least 1")]
)
def test_settings_that_cannot_work_are_refused(settings, message):
    table = table_of("shakespeare") | {"settings": settings}
    with pytest.raises(ConfigError, match=message):
        resolve(table, data=False)


@pytest.mark.parametrize(("characters", "context"), [(0, 1), (19, 1), (4500, 225)])
def test_a_text_without_a_whole_piece_for_validation_is_refused_before_learners_start(tmp_path, characters, context):
    """A twentieth of 4,500 characters is 225, and a piece has one character more than its context."""
    file = tmp_path / "text"
    file.write_text((TEXT * 2)[:characters])
    config = CharactersConfig(str(file), context=context)
    with pytest.raises(DataError, match=f"has {characters:,} characters; a context of {context} needs about"):
        Characters.check_data(config)


def test_the_shortest_text_that_is_long_enough_trains_and_is_evaluated(tmp_path):
    (tmp_path / "text").write_text(TEXT[:4500])
    config = CharactersConfig(str(tmp_path / "text"), layers=1, width=4, heads=1, context=224)
    Characters.check_data(config)
    task = Characters(config, seed=0)
    with torch.no_grad():
        assert task.evaluate(task.module(), "valid")["samples"] == 1


def parameter_count(tokens, context, layers, width):
    """Two embeddings; per block 12 C^2 weights, 9 C biases and 4 C of LayerNorm; the last LayerNorm."""
    return (tokens + context) * width + layers * (12 * width**2 + 13 * width) + 2 * width


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({}, 0.81e6),
        ({"layers": 12, "width": 768, "heads": 12, "context": 1024}, 85.9e6),
        ({"layers": 12, "width": 924, "heads": 12, "context": 1024}, 124e6),
    ],
)
def test_settings_give_the_size_of_the_model(tmp_path, settings, parameters):
    (tmp_path / "text").write_text(TEXT * 5)
    config = resolve(table_of("shakespeare") | {"settings": settings | {"data": str(tmp_path / "text")}})
    task = Characters(config.settings, seed=0)
    sizes, tokens = task.config, len(set(TEXT))
    with torch.device("meta"):  # shapes without memory
        count = sum(weight.numel() for weight in task.module().parameters())
    assert count == parameter_count(tokens, sizes.context, sizes.layers, sizes.width)
    assert count == pytest.approx(parameters, rel=0.01)


def test_with_gpt_2s_vocabulary_the_model_has_124_million_parameters():
    with torch.device("meta"):
        model = GPT(tokens=50257, context=1024, layers=12, width=768, heads=12)
    assert sum(weight.numel() for weight in model.parameters()) == parameter_count(50257, 1024, 12, 768) == 124_439_808


@pytest.mark.parametrize("recipe", [name for name in built_in() if name.startswith("shakespeare")])
def test_a_recipe_trains_and_its_result_has_a_sample(recipe, text_file, tmp_path):
    """On the virtual clock, with a small model: it learns the one sentence of its text."""
    small = {"data": str(text_file), "layers": 1, "width": 32, "heads": 2, "context": 16}
    config = resolve(
        table_of(recipe) | {"settings": small, "learners": 2},
        [
            ("budget.epochs", "10"),
            ("checkpoint.every_epochs", "10"),
            ("local_sgd.every", "5"),
            ("optimizer.lr", "1e-2"),
        ],
    )
    folder = tmp_path / "run"
    run_directory.begin(folder, config, "test")
    results = SimulatedRun(config, folder, Links(), constant(1.0)).run()
    assert results["valid"]["loss"] < 0.8 * math.log(28)
    written = (folder / "results.json").read_text()
    assert '"sample": "' in written
