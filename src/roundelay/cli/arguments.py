"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roundelay.errors import LaunchError, UsageError, check_installed
from roundelay.topology.registry import TOPOLOGIES
from roundelay.training.recipe_files import built_in, summary

if TYPE_CHECKING:
    from roundelay.cluster.connection_settings import ConnectionSettings
    from roundelay.transport.security import Security

LAST_PORT = 65535
PICTURES = (".svg", ".png", ".pdf")

_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}


def positive_int(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError for any other text, as all functions here do."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 1, got '{text}'")
    return number


def whole_number(text: str) -> int:
    """A whole number of at least 0, such as a seed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 0, got '{text}'")
    return int(text)


def parameter_count(text: str) -> int:
    """How many weights: 43M, 500K, 1000000. At least 1000.

    >>> parameter_count("1.5M")
    1500000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(M|K|)", text.strip())
    count = int(float(match[1]) * {"M": 1e6, "K": 1e3, "": 1}[match[2]]) if match else 0
    if count < 1000:
        raise argparse.ArgumentTypeError(
            f"needs a number of weights of at least 1000, such as 43M or 500K, got '{text}'"
        )
    return count


def output_path(text: str, endings: Sequence[str] = PICTURES) -> Path:
    """The path of a file to write, with one of these endings. Its folder must exist.

    The file is opened, so that a long computation does not end with a result that cannot be written.
    """
    path = Path(text)
    if path.suffix not in endings:
        raise argparse.ArgumentTypeError(f"needs a file name that ends in {', '.join(endings)}, got '{text}'")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write '{text}': there is no folder '{path.parent}'; make it first")
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write '{text}': {error.strerror}; choose another file") from None
    if not existed:
        path.unlink()
    return path


def picture_path(text: str) -> Path:
    """The path of a picture to write. Raises MissingExtraError without matplotlib."""
    path = output_path(text)
    check_installed("matplotlib", "drawing", "plots")
    return path


def make_folder(folder: Path, option: str) -> None:
    """Make the folder that an option names, and its parents. Raises UsageError if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder '{folder}': {error.strerror}; choose another {option}") from None


def byte_count(text: str) -> float:
    """Bytes with an optional decimal prefix: 165MB, 4G, 1000.

    >>> byte_count("165MB"), byte_count("1e6")
    (165000000.0, 1000000.0)
    """
    return _scaled(text, r"([KMGT]?)B?", _PREFIX, "a size such as 165MB")


def bandwidth(text: str) -> float:
    """Bytes a second from bits: 100Gb, 10Gb/s; or from bytes: 1.25GB/s.

    >>> bandwidth("10Gb/s"), bandwidth("1.25GB/s")
    (1250000000.0, 1250000000.0)
    """
    bits = re.fullmatch(r"(.*[0-9.]\s*[KMGT]?)b(?:it)?(?:/s)?", text)
    if bits:
        return byte_count(bits[1]) / 8
    return _scaled(text, r"([KMGT]?)B(?:/s)?", _PREFIX, "a bandwidth such as 100Gb/s or 1.25GB/s")


def duration(text: str) -> float:
    """Seconds from a number with an optional unit: 0.3, 300ms, 5us.

    >>> duration("300ms"), duration("2")
    (0.3, 2.0)
    """
    return _scaled(text, r"(s|ms|us|µs|)", _SECONDS, "a time such as 300ms")


def number(text: str) -> float:
    """A number of at least 0."""
    return _scaled(text, "()", {"": 1.0}, "a number of at least 0")


def slowdown(text: str) -> float:
    """A number of at least 1: how many times slower a learner is."""
    wanted = "a number of at least 1"
    value = _scaled(text, "()", {"": 1.0}, wanted)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs {wanted}, got '{text}'")
    return value


def more_than_0(parse: Callable[[str], float]) -> Callable[[str], float]:
    """`parse`, but 0 is refused too."""

    def parsed(text: str) -> float:
        value = parse(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, got '{text}'")
        return value

    return parsed


def _scaled(text: str, unit: str, scale: dict[str, float], wanted: str) -> float:
    match = re.fullmatch(rf"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*{unit}\s*", text)
    if not match:
        raise argparse.ArgumentTypeError(f"needs {wanted}, got '{text}'")
    value = float(match[1]) * scale[match[2]]
    if value == float("inf"):
        raise argparse.ArgumentTypeError(f"needs {wanted}, got '{text}', which is too large")
    return value


# The registry of strategies has these names, too. They stand here because the registry needs torch, which is slow to import.
STRATEGIES = ("adpsgd", "dpsgd", "allreduce", "delay-by-one", "delay-by-one-gradients", "local-sgd")
# Keys of the configuration that have an option of their own: option -> key, name of its value, help.
_CONFIGURATION_OPTIONS = {
    "learners": ("learners", "N", "number of learners"),
    "strategy": (
        "strategy",
        "S",
        f"how learners average: {', '.join(STRATEGIES)}, or module:Class",
    ),
    "topology": (
        "topology",
        "T",
        "which learners average with each other: a name (see `roundelay topology compare`), a graph file, or module:function",
    ),
    "group-size": ("group_size", "M", "learners per super-learner; 0: the learners of one machine"),
    "epochs": ("budget.epochs", "E", "passes over the data, counted over all learners"),
    "seed": ("seed", "SEED", "seed of weights, shuffling, augmentation and random topologies"),
    "slow": (
        "slow",
        "LEARNER:FACTOR",
        "make the steps of a learner FACTOR times as long; several are separated by commas",
    ),
    "data": ("settings.data", "PATH", "folder or archive of the task's data"),
}


def add_recipe(parser: argparse.ArgumentParser, meaning: str, *, optional: bool) -> None:
    """Declare the argument RECIPE, and list the built-in recipes at the end of the help."""
    recipes = built_in()
    known(parser.add_argument("recipe", metavar="RECIPE", nargs="?" if optional else None, help=meaning), recipes)
    width = max(map(len, recipes)) + 4
    listed = "\n".join(
        textwrap.fill(_recipe_line(name, path, width), 78, subsequent_indent=" " * width)
        for name, path in recipes.items()
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps lines as they are, so wrap them here
    parser.description = textwrap.fill(parser.description or "", 78)
    parser.epilog = f"built-in recipes:\n{listed}"


def _recipe_line(name: str, path: Path, width: int) -> str:
    return f"  {name}".ljust(width) + summary(path)


def known(action: argparse.Action, names: Iterable[str]) -> None:
    """Remember names that this argument may have, beside other values: shells complete them."""
    action.known = tuple(names)  # type: ignore[attr-defined]


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Declare the options that change a recipe's configuration."""
    names = {"strategy": STRATEGIES, "topology": tuple(TOPOLOGIES)}
    for name, (_, metavar, meaning) in _CONFIGURATION_OPTIONS.items():
        known(parser.add_argument(f"--{name}", metavar=metavar, help=meaning), names.get(name, ()))
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other key of the configuration, such as data.batch=64; may be repeated",
    )


def configured(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The keys and values that the options of `add_configuration` give."""
    options = {key: getattr(args, name.replace("-", "_")) for name, (key, *_) in _CONFIGURATION_OPTIONS.items()}
    return [(key, value) for key, value in options.items() if value is not None] + assignments(args.set)


def dated_folder(recipe: str, prefix: str = "") -> Path:
    """The default directory of a run, from recipe and time: runs/an4-best-20260102-030405 for the recipe an4/best."""
    name = Path(recipe).stem if recipe.endswith(".toml") else recipe.partition(":")[0].replace("/", "-")
    return Path("runs") / f"{prefix}{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def assignments(words: Iterable[str]) -> list[tuple[str, str]]:
    """Keys and values of `--set KEY=VALUE`. Raises UsageError for anything else.

    >>> assignments(["data.batch=64"])
    [('data.batch', '64')]
    """
    pairs = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--set needs KEY=VALUE, such as data.batch=64, got '{word}'")
        pairs.append((key.strip(), value.strip()))
    return pairs


WITH_A_RENDEZVOUS = "the loopback; with a rendezvous elsewhere, the interface that leads there"


def add_security(parser: argparse.ArgumentParser, default_host: str = WITH_A_RENDEZVOUS) -> None:
    """Declare the options of commands that listen for connections."""
    add = parser.add_argument
    add("--host", metavar="ADDRESS", help=f"the interface to listen on (default: {default_host})")
    add(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="a file with the run's secret, for learners on several machines",
    )
    add(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt all connections with the certificate in DIR; it is made if there is none",
    )
    add(
        "--open-collectives",
        action="store_true",
        help="allow collectives, which have no authentication, on that interface; adpsgd and local-sgd need none",
    )


def connection_settings(
    args: argparse.Namespace, rendezvous: tuple[str, int] | None, security: Security | None = None
) -> ConnectionSettings:
    """The settings that the options of `add_security` give. `security` is the run's, if it is known already.

    Raises UsageError if an interface is named without a secret that other machines can know.
    """
    from roundelay.cluster.connection_settings import ConnectionSettings
    from roundelay.cluster.environment import LOOPBACK

    security = security or _security(args)
    if security is None and (rendezvous is not None or args.host not in (None, LOOPBACK)):
        raise UsageError(
            "learners on other machines need the run's secret: give --secret-file, or set ROUNDELAY_SECRET"
        )
    security = security or ConnectionSettings.on_this_machine().security
    if args.tls is not None:
        security = security.with_tls(args.tls)
    return ConnectionSettings(security, rendezvous, args.host, args.open_collectives)


def port(text: str) -> int:
    """The number of a TCP port, from 0 (any free port) to 65535."""
    if not (text.isdecimal() and int(text) <= LAST_PORT):
        raise argparse.ArgumentTypeError(f"needs a port from 0 to {LAST_PORT}, got '{text}'")
    return int(text)


def rendezvous_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raises LaunchError for anything else."""
    from roundelay.cluster.environment import parsed_address

    host, number = parsed_address(text)
    if number > LAST_PORT:
        raise LaunchError(f"an address is HOST:PORT with a port of at most {LAST_PORT}, got '{text}'")
    return host, number


def security_options(args: argparse.Namespace) -> list[str]:
    """The options of `add_security` as words of a command line, for a command to be printed."""
    options = {"--host": args.host, "--secret-file": args.secret_file, "--tls": args.tls}
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    return words + ["--open-collectives"] * args.open_collectives


def _security(args: argparse.Namespace) -> Security | None:
    from roundelay.transport.security import SECRET, Security

    if args.secret_file is None:
        return Security.from_environment()
    try:
        text = args.secret_file.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read --secret-file '{args.secret_file}': {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    return Security.from_environment(dict(os.environ) | {SECRET: text}, f"the secret in '{args.secret_file}'")
