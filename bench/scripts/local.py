"""Checkpoints and data sets in the formats of torchtune, LitGPT and Ultralytics, made on the spot.

    python -m bench.scripts.local llama OUT | litgpt OUT NAME | tokens OUT | words OUT
                                  | images OUT COUNT

Checkpoints have the real shapes and no contents: sparse files, as large as the real ones to read.
"""

from __future__ import annotations

import base64
import json
import math
import random
import sys
from functools import partial
from pathlib import Path

_ROWS = 200
_WORDS = ("alpha", "beta", "gamma", "delta")
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Llama 3.2 1B."""


def llama(folder: Path) -> None:
    """A Hugging Face checkpoint of Llama 3.2 1B in bf16, a tokenizer of bytes for tiktoken, and
    instructions in Alpaca's format."""
    shapes = _llama_shapes()
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(_LLAMA), encoding="utf-8")
    ranks = (base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    (folder / "tokenizer.model").write_bytes(b"".join(ranks))
    instructions(folder)


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    width, inner, kv = 2048, 8192, 8 * 64
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128256, width),
        "model.norm.weight": (width,),
    }
    for layer in range(16):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }.items():
            shapes[f"{prefix}{name}.weight"] = shape
    return shapes


def litgpt(folder: Path, name: str) -> None:
    """LitGPT's checkpoint folder for one of its configurations, and instructions."""
    from memplan.capturing.standins.adapters import make_torchvision_importable

    make_torchvision_importable()
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = Config.from_name(name)
    with torch.device("meta"):
        model = GPT(config).bfloat16()
    state = {
        key: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        for key, value in model.state_dict().items()
    }
    with torch.serialization.skip_data():
        torch.save(state, folder / "lit_model.pth")
    save_config(config, folder)
    special = ["<s>", "</s>", "<unk>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    instructions(folder)
    text = folder / "text"
    text.mkdir(exist_ok=True)
    chance = random.Random(1)
    for part in range(4):
        words = chance.choices(_WORDS, k=40_000)
        (text / f"{part}.txt").write_text(" ".join(words), encoding="utf-8")


def tokens(folder: Path) -> None:
    """The text of LitGPT's checkpoint folder, tokenised by LitGPT itself as on a first run."""
    from memplan.capturing.standins.adapters import make_torchvision_importable

    make_torchvision_importable()
    import litdata
    from litgpt.data import TextFiles
    from litgpt.tokenizer import Tokenizer

    # Spawned workers would import torchvision, which only this process can.
    litdata.optimize = partial(litdata.optimize, start_method="fork")
    data = TextFiles(train_data_path=folder / "text", num_workers=1)
    data.connect(Tokenizer(folder), batch_size=4, max_seq_length=2048)
    data.prepare_data()


def instructions(folder: Path) -> None:
    """Instructions in Alpaca's format, of different lengths."""
    chance = random.Random(0)
    rows = [
        {
            "instruction": f"Describe item {number}.",
            "input": "",
            "output": " ".join(chance.choices(_WORDS, k=chance.randint(5, 60))),
        }
        for number in range(_ROWS)
    ]
    (folder / "alpaca.json").write_text(json.dumps(rows), encoding="utf-8")


def words(folder: Path) -> None:
    """Text where Lightning's demonstration keeps WikiText-2."""
    chance = random.Random(0)
    lines = (" ".join(chance.choices(_WORDS, k=20)) for _ in range(200))
    (folder / "wikitext-2.txt").write_text("\n".join(lines), encoding="utf-8")


def images(folder: Path, count: int) -> None:
    """Images with one box each, in the format of YOLO's data sets."""
    from PIL import Image

    chance = random.Random(0)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            colour = tuple(chance.randrange(256) for _ in range(3))
            image = Image.new("RGB", (640, 480), colour)
            image.save(folder / "images" / part / f"{number}.jpg")
            box = f"{number % 2} 0.5 0.5 0.{chance.randint(1, 9)} 0.{chance.randint(1, 9)}\n"
            (folder / "labels" / part / f"{number}.txt").write_text(box, encoding="utf-8")
    settings = {
        "path": str(folder),
        "train": "images/train",
        "val": "images/val",
        "names": {0: "one", 1: "two"},
    }
    (folder / "data.yaml").write_text(json.dumps(settings), encoding="utf-8")


def main() -> None:
    kind, folder, *rest = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "llama":
        llama(folder)
    elif kind == "litgpt":
        litgpt(folder, rest[0])
    elif kind == "tokens":
        tokens(folder)
    elif kind == "words":
        words(folder)
    else:
        images(folder, int(rest[0]))


if __name__ == "__main__":
    main()
