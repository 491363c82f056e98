"""Sentences for BERT and T5, which have no mock data.

Megatron-LM masks words of an indexed data set, by a tokenizer that Transformers knows under the
name of a model. A folder of that name in the working directory takes the place of what Transformers
would download.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

CASED = "BertWordPieceCase"
_MODELS = {CASED: ("bert-large-cased", 28_996), "": ("bert-large-uncased", 30_522)}
"""Names and vocabulary sizes of the tokenizers, `""` for the scripts' default one."""
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DOCUMENTS = 24_000
"""So many that a split of 9 in 100,000 has one."""
_SENTENCES = 4
_LONGEST = 48
_NAME = "sentences"
_MAGIC = b"MMIDIDX\x00\x00"
_INT32 = 4
"""The format's code of a type (`megatron/core/datasets/indexed_dataset.py`)."""


def vocabulary(folder: Path, kind: str) -> Path:
    """The words of a tokenizer of type `kind`, where Transformers looks first from `folder`."""
    return folder / _MODELS[kind][0] / "vocab.txt"


def write_tokenizer(folder: Path, kind: str) -> None:
    """That vocabulary, and what belongs to it."""
    _, size = _MODELS[kind]
    place = vocabulary(folder, kind)
    place.parent.mkdir(exist_ok=True)
    words = [*_SPECIAL, *(f"w{number}" for number in range(size - len(_SPECIAL)))]
    place.write_text("\n".join(words) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_config": {"tokenizer_class": "BertTokenizer", "do_lower_case": kind != CASED},
        "config": {"model_type": "bert", "vocab_size": size},
    }
    for name, content in settings.items():
        place.with_name(f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def data_path(folder: Path) -> Path:
    """What `--data-path` is to be."""
    return folder / _NAME


def write_data(folder: Path) -> None:
    """The indexed data set, in Megatron-LM's format; its words are in every vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    most = min(size for _, size in _MODELS.values())
    random = np.random.default_rng(0)
    lengths = random.integers(8, _LONGEST, _DOCUMENTS * _SENTENCES, dtype=np.int32)
    words = random.integers(len(_SPECIAL), most, int(lengths.sum()), dtype=np.int32)
    data_path(folder).with_suffix(".bin").write_bytes(words.tobytes())
    ends = np.cumsum(lengths, dtype=np.int64) * words.itemsize
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    documents = np.arange(_DOCUMENTS + 1, dtype=np.int64) * _SENTENCES
    head = struct.pack("<9sQBQQ", _MAGIC, 1, _INT32, len(lengths), len(documents))
    index = data_path(folder).with_suffix(".idx")
    index.write_bytes(head + lengths.tobytes() + starts.tobytes() + documents.tobytes())
