"""Sentences for BERT, T5 and fill-in-the-middle samples, which have no mock data.

Megatron-LM masks or moves words of an indexed data set, by a tokenizer that Transformers knows
under the name of a model. A folder of that name in the working directory takes the place of what
Transformers would download.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import numpy as np

CASED = "BertWordPieceCase"
BPE = "GPT2BPETokenizer"
_MODELS = {
    CASED: ("bert-large-cased", 28_996),
    "": ("bert-large-uncased", 30_522),
    BPE: ("gpt2", 50_257),
}
"""Names and vocabulary sizes of the tokenizers, `""` for the default one of BERT and T5."""
_END = "<|endoftext|>"
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
    return folder / _MODELS[kind][0] / ("vocab.json" if kind == BPE else "vocab.txt")


def merges(folder: Path) -> Path:
    """What belongs to the vocabulary of byte pairs."""
    return vocabulary(folder, BPE).with_name("merges.txt")


def write_tokenizer(folder: Path, kind: str) -> None:
    """That vocabulary, and what belongs to it."""
    _, size = _MODELS[kind]
    place = vocabulary(folder, kind)
    place.parent.mkdir(exist_ok=True)
    if kind == BPE:
        _write_byte_pairs(folder, size)
    else:
        words = [*_SPECIAL, *(f"w{number}" for number in range(size - len(_SPECIAL)))]
        place.write_text("\n".join(words) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_config": (
            {"tokenizer_class": "GPT2Tokenizer"}
            if kind == BPE
            else {"tokenizer_class": "BertTokenizer", "do_lower_case": kind != CASED}
        ),
        "config": {"model_type": "gpt2" if kind == BPE else "bert", "vocab_size": size},
    }
    for name, content in settings.items():
        place.with_name(f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def _write_byte_pairs(folder: Path, size: int) -> None:
    """All bytes, as the letters that GPT-2 writes them as, and pairs of them."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printed]
    letters += [chr(0x100 + number) for number in range(0x100 - len(printed))]
    pairs = list(itertools.islice(itertools.product(letters, letters), size - len(letters) - 1))
    words = [*letters, *map("".join, pairs), _END]
    numbers = {word: number for number, word in enumerate(words)}
    vocabulary(folder, BPE).write_text(json.dumps(numbers), encoding="utf-8")
    lines = [" ".join(pair) for pair in pairs]
    merges(folder).write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")


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
