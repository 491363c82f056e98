"""Models and data sets as a hub would deliver them, made here: `python -m bench.scripts.make`.

    make model FOLDER TYPE [KEY=VALUE …]     configuration, tokenizer and weights of an architecture
    make data FOLDER KIND [ROWS]             a data set of one kind: chat, text, preference, …

The weights file has its real size and no contents: a hole that takes no room on the disk.
"""

from __future__ import annotations

import functools
import json
import math
import random
import string
import struct
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")
_ROWS = 96


def model(folder: Path, kind: str, settings: list[str]) -> None:
    """A model of `transformers` that `from_pretrained(folder)` loads.

    `settings` are the configuration's; `class` is the model's class, `dtype` the weights'.
    """
    import torch
    import transformers

    from memplan.capturing.standins.adapters import make_torchvision_importable

    make_torchvision_importable()  # transformers imports it with its models

    named = {key: json.loads(value) for key, _, value in (s.partition("=") for s in settings)}
    dtype = getattr(torch, named.pop("dtype", "float32"))
    factory = named.pop("class", None)
    config = transformers.AutoConfig.for_model(kind, **named)
    config.dtype = dtype
    with torch.device("meta"):
        if factory:
            built = getattr(transformers, factory)(config)
        else:
            built = transformers.AutoModelForCausalLM.from_config(config)
    built = built.to(dtype)
    config.architectures = [type(built).__name__]
    config.save_pretrained(folder)
    tokenizer(folder)
    tied = set(getattr(built, "all_tied_weights_keys", None) or ())
    weights = {name: t for name, t in built.state_dict().items() if name not in tied}
    hollow_safetensors(folder / "model.safetensors", weights)


def hollow_safetensors(path: Path, weights: dict[str, Any]) -> None:
    """A safetensors file of the weights' shapes and dtypes, all zeros, as one hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with a chat template, trained on the words of the passages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=list(_SPECIAL), initial_alphabet=alphabet
    )
    raw.train_from_iterator(_pages(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|endoftext|>",
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=4096,
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)


@functools.cache
def _pages() -> list[str]:
    """The same text at all times: with other lengths a job would have another answer."""
    chance = random.Random(0)
    letters = string.ascii_lowercase
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(3000)]
    commoner_first = [1 / (rank + 1) for rank in range(len(words))]
    return [" ".join(chance.choices(words, commoner_first, k=1000)) for _ in range(40)]


def _texts(words_each: int) -> Iterator[str]:
    """Passages of half to twice `words_each` words."""
    words = " ".join(_pages()).split()
    chance = random.Random(0)
    while True:
        count = chance.randint(words_each // 2, words_each * 2)
        begin = chance.randrange(max(len(words) - count, 1))
        yield " ".join(words[begin : begin + count])


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _chat(texts: Iterator[str]) -> dict[str, Any]:
    return {"messages": [_turn("user", next(texts)), _turn("assistant", next(texts))]}


def _preference(texts: Iterator[str]) -> dict[str, Any]:
    question = _turn("user", next(texts))
    return {
        "chosen": [question, _turn("assistant", next(texts))],
        "rejected": [question, _turn("assistant", next(texts))],
    }


def _unpaired(texts: Iterator[str]) -> dict[str, Any]:
    text = next(texts)
    return {
        "prompt": [_turn("user", text)],
        "completion": [_turn("assistant", next(texts))],
        "label": len(text) % 2 == 0,
    }


def _pairs(texts: Iterator[str]) -> dict[str, Any]:
    first, second = next(texts), next(texts)
    return {"sentence1": first, "sentence2": second, "label": len(first) % 2, "idx": 0}


KINDS: dict[str, tuple[Callable[[Iterator[str]], dict[str, Any]], int, tuple[str, ...]]] = {
    "chat": (_chat, 150, ("train", "test")),
    "preference": (_preference, 100, ("train", "test")),
    "unpaired": (_unpaired, 100, ("train", "test")),
    "prompts": (lambda texts: {"prompt": [_turn("user", next(texts))]}, 50, ("train", "test")),
    "text": (lambda texts: {"text": next(texts)}, 300, ("train", "validation")),
    "pairs": (_pairs, 25, ("train", "validation")),
}
"""How a row is made, words of a passage, and the splits."""


def data(folder: Path, kind: str, rows: int = _ROWS, name: str = "default") -> None:
    """A data set in JSON lines that `datasets.load_dataset(folder, name)` reads."""
    make, words, splits = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    texts = _texts(words)
    for split in splits:
        lines = [json.dumps(make(texts)) for _ in range(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    listed = "".join(f"  - split: {s}\n    path: {s}.jsonl\n" for s in splits)
    card = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{listed}---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


def metric(folder: Path) -> None:
    """A metric that `evaluate.load(folder)` loads: accuracy."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{folder.name}.py").write_text(
        textwrap.dedent('''\
        """Accuracy."""

        import datasets
        import evaluate


        class Accuracy(evaluate.Metric):
            def _info(self):
                number = datasets.Value("int64")
                features = datasets.Features({"predictions": number, "references": number})
                return evaluate.MetricInfo(description="", citation="", features=features)

            def _compute(self, predictions, references):
                same = sum(p == r for p, r in zip(predictions, references, strict=True))
                return {"accuracy": same / len(references), "f1": 0.0}
        '''),
        encoding="utf-8",
    )


def main() -> int:
    what, folder, *rest = sys.argv[1:]
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if what == "model":
        model(place, rest[0], rest[1:])
    elif what == "data":
        data(place, rest[0], int(rest[1]) if len(rest) > 1 else _ROWS, *rest[2:3])
    elif what == "metric":
        metric(place)
    else:
        raise SystemExit(f"cannot make {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
