"""The cases: what was measured, and the command that a case's configuration stands for."""

from __future__ import annotations

import csv
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.megatron.sentences import BPE, data_path, merges, vocabulary
from bench.results import ROOT

_SHARED = Path(os.environ.get("MEMPLAN_SHARED_DATA") or ROOT.parent / "shared" / "data")
DATA = _SHARED / "measured" / "megatron"
SOURCE = _SHARED.parent / "third_party" / "megatron-lm"
BUILD = ROOT / "build" / "megatron"
SENTENCES = BUILD / "sentences"
_WORLD_SIZE = 8
GPUS = {"h100": "h100", "a100": "a100-80gb"}
ENGINE = "transformer_engine"
PACKAGES = (ENGINE, "apex", "flash_attn")
"""On the machines that were measured, and used where they are there."""
_SCRIPTS = {
    "bert": "examples/bert/pretrain_bert.py",
    "t5": "examples/t5/pretrain_t5.py",
    "hybrid": "pretrain_hybrid.py",
}
_GPT_WORDS = 50_257
_OF_DATA = frozenset(
    {
        "--data-path",
        "--train-data-path",
        "--valid-data-path",
        "--test-data-path",
        "--vocab-file",
        "--merge-file",
        "--tokenizer-type",
        "--tokenizer-model",
        "--tiktoken-pattern",
        "--split",
        "--vocab-size",
        "--mock-data",
    }
)
_LIST = re.compile(r"\[[^],]*\]|\d+( \d+)+")
"""Several words of the command line: the runner of these tests takes the brackets off, where there
are any. All else is one, spaces or not."""
_MOCK = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size")


@dataclass(frozen=True)
class Golden:
    """A row of golden.csv. Bytes of the last rank; None where it was not measured."""

    case: str
    card: str
    max_allocated: int
    after_step_2: int | None

    @property
    def name(self) -> str:
        return f"{self.case}@{self.card}"


def goldens() -> list[Golden]:
    """All rows; none where the data are absent."""
    path = DATA / "golden.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Golden(
                row["case"],
                row["card"],
                int(row["max_allocated"]),
                int(row["max_allocated_after_step_2"] or 0) or None,
            )
            for row in csv.DictReader(file)
        ]


@functools.cache
def configuration(case: str) -> Mapping[str, Any]:
    """A case's model_config.yaml."""
    path = DATA / "cases" / case / "model_config.yaml"
    loaded: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def counted_apart(golden: Golden) -> str:
    """Why a case does not count towards the goals, or the empty string."""
    config = configuration(golden.case)
    if any(name.startswith(("--fp8", "--fp4")) for name in config["MODEL_ARGS"]):
        return "fp8"
    if "release" in golden.case.split("/")[1] or config.get("TEST_TYPE") == "release":
        return "release"
    if script(golden.case) is None:
        return "its script is not among the sources"
    return ""


def script(case: str) -> str | None:
    """The pretraining script, below the source; None where it is another that is not there."""
    if configuration(case).get("MODE") == "rl" or case.startswith("mimo/"):
        return None
    if "flextron" in case:
        return "megatron/elastification/pretrain_hybrid_flex.py"
    return _SCRIPTS.get(case.split("/")[0], "pretrain_gpt.py")


def world_size(case: str) -> int:
    """How many GPUs of one node the case ran on."""
    own = configuration(case).get("MODEL_ENV_VARS") or {}
    return int(own.get("MODEL_ARGS", {}).get("GPUS_PER_NODE", _WORLD_SIZE))


def installed(case: str) -> tuple[str, ...]:
    """Which of `PACKAGES` there were when the case ran: some take one away first."""
    before = str(configuration(case).get("BEFORE_SCRIPT", "")).lower()
    return tuple(name for name in PACKAGES if f"uninstall -y {name}" not in before)


def environment(case: str) -> dict[str, str]:
    """Variables that the case sets."""
    return {name: str(value) for name, value in configuration(case)["ENV_VARS"].items()}


def command(case: str, source: Path, work: Path) -> list[str]:
    """The launcher's command. What the case names of data and vocabulary is replaced by mock data,
    or sentences, with as many words; `work` takes its outputs."""
    folders: dict[str, object] = {
        "TENSORBOARD_PATH": work / "tensorboard",
        "CHECKPOINT_SAVE_PATH": work / "checkpoints",
        "CHECKPOINT_LOAD_PATH": work / "checkpoints",
        "DATA_CACHE_PATH": work / "cache",
        "DATA_PATH": work / "data",
        "REPEAT": "1",
    }
    words: list[str] = []
    given = configuration(case)["MODEL_ARGS"]
    for name, value in given.items():
        if name in _OF_DATA or name.startswith("--wandb") or value is False:
            continue
        words.append(name)
        if value is not True and value is not None:
            text = str(value)
            for variable, folder in folders.items():
                text = text.replace("${" + variable + "}", str(folder))
            words += text.strip("[]").split() if _LIST.fullmatch(text) else [text]
    if "--async-save" in given and "--async-strategy" not in given:
        words += ["--async-strategy", "mcore"]  # the default's package is on no index in that age
    program = script(case)
    assert program is not None
    launcher = ["torchrun", "--nproc-per-node", str(world_size(case)), str(source / program)]
    tokenizer = sentences_by(case)
    data = _mock(given) if tokenizer is None else _sentences(given, work, tokenizer)
    return [*launcher, *words, *data]


def sentences_by(case: str) -> str | None:
    """The tokenizer's type of a case that needs sentences: there are no mock data for BERT, T5 and
    samples whose middle is to be filled in."""
    given = configuration(case)["MODEL_ARGS"]
    if case.split("/")[0] in ("bert", "t5"):
        return str(given.get("--tokenizer-type", ""))
    return str(given.get("--tokenizer-type", BPE)) if "--fim-data" in given else None


def _mock(given: Mapping[str, Any]) -> list[str]:
    return [*_MOCK, str(given.get("--vocab-size", _GPT_WORDS))]


def _sentences(given: Mapping[str, Any], work: Path, tokenizer: str) -> list[str]:
    words = ["--data-path", str(data_path(SENTENCES)), "--split", str(given["--split"])]
    words += ["--vocab-file", str(vocabulary(work, tokenizer))]
    if tokenizer == BPE:
        words += ["--merge-file", str(merges(work))]
    return [*words, *(["--tokenizer-type", tokenizer] if tokenizer else [])]
