"""Small data sets in the formats that vision, text and graph scripts read, made on the spot.

python -m bench.scripts.datasets mnist OUT | classes OUT | cora OUT | bsds OUT
                                 | tokens OUT VOCABULARY | weights OUT MODEL FILE
                                 | copy OUT SOURCE | molecules OUT
"""

from __future__ import annotations

import math
import pickle
import random
import shutil
import struct
import sys
from pathlib import Path

_MNIST = (("train", 6000), ("t10k", 2000))
_PER_CLASS = 100


def mnist(folder: Path) -> None:
    """MNIST's files where torchvision keeps them unpacked: 6,000 and 2,000 black images."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in _MNIST:
        images = struct.pack(">4I", 2051, count, 28, 28) + bytes(count * 28 * 28)
        labels = struct.pack(">2I", 2049, count) + bytes(n % 10 for n in range(count))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def classes(folder: Path) -> None:
    """Images in a folder for each class, as `torchvision.datasets.ImageFolder` reads them."""
    for part in ("train", "val"):
        for name in ("ant", "bee", "cat"):
            _images(folder / part / name, (256, 256))


def bsds(folder: Path) -> None:
    """Images of the size and in the folders of BSDS300."""
    for part in ("train", "test"):
        _images(folder / "BSDS300" / "images" / part, (481, 321))


def _images(folder: Path, size: tuple[int, int]) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(_PER_CLASS):
        Image.new("RGB", size, (number, 100, 50)).save(folder / f"{number}.jpg")


def cora(folder: Path) -> None:
    """A citation graph of Cora's size: 2,708 papers, 1,433 words, 5,429 citations, 7 classes."""
    chance = random.Random(0)
    papers = (
        "\t".join(
            (str(paper), *("01"[chance.random() < 0.0127] for _ in range(1433)), f"c{paper % 7}")
        )
        for paper in range(2708)
    )
    (folder / "cora.content").write_text("\n".join(papers), encoding="utf-8")
    cites = (f"{chance.randrange(2708)}\t{chance.randrange(2708)}" for _ in range(5429))
    (folder / "cora.cites").write_text("\n".join(cites), encoding="utf-8")


def tokens(folder: Path, vocabulary: int) -> None:
    """Tokenised text as nanoGPT's scripts prepare it: only characters come with their codes."""
    import numpy as np

    for part, count in (("train", 1_000_000), ("val", 100_000)):
        (np.arange(count) % vocabulary).astype(np.uint16).tofile(folder / f"{part}.bin")
    if vocabulary > 256:
        return
    with (folder / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": vocabulary, "itos": {}, "stoi": {}}, file)


def weights(folder: Path, model: str, name: str) -> None:
    """Weights of a torchvision model as its hub delivers them: the real size, no contents."""
    import torch

    from memplan.capturing.standins.adapters import make_torchvision_importable

    make_torchvision_importable()
    import torchvision

    with torch.device("meta"):
        built = torchvision.models.get_model(model)
    state = {
        key: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        for key, value in built.state_dict().items()
        if math.prod(value.shape)
    }
    with torch.serialization.skip_data():
        torch.save(state, folder / name)


def molecules(folder: Path) -> None:
    """Small molecules with energies and forces, in the extended XYZ format: 60, atoms on a grid."""
    chance = random.Random(0)
    columns = "Properties=species:S:1:pos:R:3:REF_forces:R:3"
    lines = []
    for number in range(60):
        atoms = 9 + number % 6
        lines += [str(atoms), f'{columns} REF_energy={chance.random()} pbc="F F F"']
        for atom in range(atoms):
            place = [1.3 * (atom // step % 3) + chance.uniform(-0.1, 0.1) for step in (1, 3, 9)]
            numbers = (*place, *(chance.random() for _ in range(3)))
            lines.append(" ".join(("HCNO"[atom % 4], *(f"{value:.6f}" for value in numbers))))
    (folder / "train.xyz").write_text("\n".join(lines) + "\n", encoding="utf-8")


def copy(folder: Path, source: Path) -> None:
    """Scripts that want to be run in their own folder, with data beside them."""
    shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)


def main() -> None:
    kind, folder, *rest = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "mnist":
        mnist(folder)
    elif kind == "classes":
        classes(folder)
    elif kind == "cora":
        cora(folder)
    elif kind == "bsds":
        bsds(folder)
    elif kind == "tokens":
        tokens(folder, int(rest[0]))
    elif kind == "weights":
        weights(folder, *rest)
    elif kind == "molecules":
        molecules(folder)
    elif kind == "copy":
        copy(folder, Path(rest[0]))
    else:
        raise SystemExit(f"cannot make {kind}")


if __name__ == "__main__":
    main()
