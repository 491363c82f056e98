"""What to try when a script raises an error of its own: faults that a real run would meet as well
are told from what cannot be followed."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import torch

from memplan.capturing.options import CaptureOptions
from memplan.capturing.recording.context import shown_path
from memplan.capturing.standins.finder import advice
from memplan.types.installed import is_installed

_OF_THE_WORLD = re.compile(r"world[ _-]?size|\bmesh\b|num_devices|n_?gpus", re.I)
_OF_PARALLELISM = re.compile(r"\branks?\b|parallel", re.I)
"""Layers, heads and batches do not divide either: the world's own number must be named, too."""
_NO_SUCH_DEVICE = "invalid device ordinal"
_TOO_FEW_DEVICES = re.compile(
    r"\b(only|at least|not enough|fewer|more than|requires?|needs?)\b.*\b(gpus?|cuda devices?)\b"
    r"|\b(gpus?|cuda devices?)\b.*\b(only|at least|not enough|fewer|more than|requires?|needs?)\b",
    re.I | re.S,
)
"""Lightning: "You requested gpu: [0, 1] But your machine only has: [0]"."""
_LONGEST_MESSAGE = 1000
_MEMPLAN = str(Path(__file__).parents[2])
_OURS = (
    "this is most likely a fault of memplan, not of {name}: please report it with the traceback "
    "that MEMPLAN_DEBUG=1 shows"
)
_CHECK = (
    "a check of {name} or of a package failed: mend what it asks for, if a real run would end "
    "there too; else it is memplan that answers wrongly. MEMPLAN_DEBUG=1 shows the traceback"
)
_OTHER_VERSION = (
    "the {package} installed here ({version}) has no such name: a real run with it would end there "
    "too; install the version that {name} was written for"
)
_UNKNOWN = (
    "MEMPLAN_DEBUG=1 shows the traceback; a real run may end there too: if {name} runs with a GPU, "
    "it is a fault of memplan, please report it"
)
_TO_INSTALL = re.compile(r"\binstall|\bnot installed", re.I)
"""Messages of packages that look for another package: "Make sure to install tensorboard"."""
_NO_ATTRIBUTE = re.compile(r"module '(\w+)[\w.]*' has no attribute")
_NO_NAME = re.compile(r"cannot import name '\w+' from '(\w+)[\w.]*'")
DOWNLOADS = (
    "run it once by itself if it keeps what it downloads; --allow-network lets it download here"
)
_OFFLINE = re.compile(
    r"offline mode|couldn't connect to 'http|LocalEntryNotFoundError|outgoing traffic has been",
    re.I,
)
"""What huggingface_hub, transformers and datasets say when they are told to stay offline."""


def hint_of(error: BaseException, name: str, options: CaptureOptions) -> str:
    """What to try after `error` of the script `name`."""
    text = f"{type(error).__name__}: {error}"
    if _NO_SUCH_DEVICE in text or (options.place is None and _TOO_FEW_DEVICES.search(text)):
        return _of_devices(options)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if any(Path(package).glob("*.py")) or Path(f"{package}.py").is_file():
            return f"PYTHONPATH=. in front: Python looks for {package} beside {name}, not here"
        return advice(error.name)
    if text.startswith(f"ImportError: No module named {name}"):  # of runpy, for `-m`
        return "the right name, and the folder that holds its package"
    if isinstance(error, ImportError) and _TO_INSTALL.search(text):
        return (
            "install what it asks for beside memplan; where only the machine with the GPU can have "
            "it: --with PACKAGE (docs/packages.md)"
        )
    if isinstance(error, FileNotFoundError) and error.filename:
        return "the folder that the script is run from, or the right path in its arguments"
    if isinstance(error, MemoryError):
        return "a machine with more RAM"
    if isinstance(error, EOFError):
        return f"what {name} reads from its input: echo ANSWER | memplan estimate … {name} …"
    if isinstance(error, NameError):
        return f"mend {name}: a real run would end there too"
    if not options.allow_network and _OFFLINE.search(text):
        return DOWNLOADS
    if options.place is not None and _is_of_the_world(text, options.place.world_size):
        return (
            f"the world has {_world(options)}: --world-size, or the launcher's own number "
            "(torchrun --nnodes, --nproc-per-node), or what the script is given that has to divide "
            "it"
        )
    return _of_whose_fault(error, text, name)


def _is_of_the_world(text: str, size: int) -> bool:
    named = re.search(rf"(?<![\d.]){size}(?![\d.]\d|\d)", text) is not None
    return bool(_OF_THE_WORLD.search(text) or (named and _OF_PARALLELISM.search(text)))


def _of_whose_fault(error: BaseException, text: str, name: str) -> str:
    found = _NO_ATTRIBUTE.search(text) or _NO_NAME.search(text)
    if found is not None and found[1] in sys.modules and not found[1].startswith("memplan"):
        version = getattr(sys.modules[found[1]], "__version__", "")
        if version:
            return _OTHER_VERSION.format(name=name, package=found[1], version=version)
    if (known := of_shape_rule(text)) is not None:
        return known
    if is_ours(error):
        return _OURS.format(name=name)
    return (_CHECK if isinstance(error, AssertionError) else _UNKNOWN).format(name=name)


def is_ours(error: BaseException) -> bool:
    """Whether memplan's own code raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_MEMPLAN)


def of_shape_rule(text: str) -> str | None:
    """What to try after PyTorch's message that a custom operator has no shape rule; else None."""
    if "no fake impl registered" not in text:
        return None
    return (
        "torch.library.register_fake, or memplan.register_rule in a file that --with names "
        "(docs/packages.md), says what the operator makes; without it nobody knows what it takes"
    )


def _world(options: CaptureOptions) -> str:
    place = options.place
    assert place is not None
    nodes = place.world_size // place.local_world_size
    ranks = f"{place.world_size} rank{'s' if place.world_size > 1 else ''}"
    return f"{ranks}, {place.local_world_size} on each of {nodes} nodes" if nodes > 1 else ranks


def _of_devices(options: CaptureOptions) -> str:
    place = options.place
    if place is None:
        return (
            "the script was captured as a job of one process with one GPU: cuda:0, or memplan "
            "estimate --world-size N, or its launcher before it"
        )
    if place.gpus is not None and place.gpus < place.local_world_size:
        return (
            f"CUDA_VISIBLE_DEVICES leaves each process {place.gpus} of the "
            f"{place.local_world_size} GPUs of a node: unset it"
        )
    return f"LOCAL_RANK in the place of RANK: the world has {_world(options)}"


def place_of(error: BaseException) -> str:
    """The place of an error in the user's code or, where all is installed, in a package."""
    frames = traceback.extract_tb(error.__traceback__)
    torch_folder = str(Path(torch.__file__).parent)
    for wanted in (_is_users, lambda name: torch_folder not in name and _is_packages(name)):
        own = [frame for frame in frames if wanted(frame.filename)]
        if own:
            return f"{shown_path(own[-1].filename)}:{own[-1].lineno}"
    return ""


def short_message(error: BaseException) -> str:
    """The beginning of what an error says, or the line that raised it."""
    return beginning(str(error)) or _failing_line(error) or "(no message)"


def _failing_line(error: BaseException) -> str:
    """The source line that raised an error without a message, such as an `assert`; "" for none."""
    frames = traceback.extract_tb(error.__traceback__)
    return beginning(frames[-1].line or "") if frames else ""


def beginning(message: str) -> str:
    """The first paragraph of an error's message: PyTorch's can be pages long."""
    first = message.strip().split("\n\n", 1)[0]
    return first if len(first) <= _LONGEST_MESSAGE else first[:_LONGEST_MESSAGE] + " …"


def _is_packages(filename: str) -> bool:
    return "site-packages" in filename and _MEMPLAN not in filename


def _is_users(filename: str) -> bool:
    return not (filename.startswith("<") or is_installed(filename))
