from __future__ import annotations

from pathlib import Path

import pytest

from memplan.capturing.options import ScriptTarget
from memplan.fit.knobs import Knob, find_accumulation, find_knobs
from memplan.fit.options import NumericOption

ROOT = Path(__file__).resolve().parents[2]


def script(folder: Path, source: str, *argv: str) -> ScriptTarget:
    path = folder / "train.py"
    path.write_text(source)
    return ScriptTarget("script", str(path), argv)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        (
            "gpt2",
            [
                Knob("batch_size", "--batch-size", 8),
                Knob("sequence_length", "--context", 1024),
            ],
        ),
        (
            "resnet50",
            [Knob("batch_size", "--batch-size", 64), Knob("image_size", "--image-size", 224)],
        ),
        (
            "hf_trainer",
            [
                Knob("batch_size", "--batch-size", 32),
                Knob("sequence_length", "--length", 256),
            ],
        ),
        (
            "llama3_8b",
            [
                Knob("batch_size", "--batch-size", 1),
                Knob("sequence_length", "--length", 2048),
            ],
        ),
    ],
)
def test_the_examples(name: str, knobs: list[Knob]) -> None:
    program = ScriptTarget("script", str(ROOT / "examples" / name / "train.py"))
    assert find_knobs(program) == knobs


@pytest.mark.parametrize(
    ("source", "argv", "knobs"),
    [
        ("", (), []),
        ("batch_size = 8", (), []),
        ("", ("--batch-size", "12"), [Knob("batch_size", "--batch-size", 12)]),
        ("", ("--seq_len=512",), [Knob("sequence_length", "--seq_len", 512)]),
        ("", ("--batch-size", "many"), []),
        ("", ("--batch-size",), []),
        ("", ("--lr", "3"), []),
        (
            "p.add_argument('-b', '--bs', default=4)",
            ("-b", "2"),
            [Knob("batch_size", "-b", 2)],
        ),
        (
            "p.add_argument('--batch-size', default=4)",
            ("--batch-size", "6", "--batch-size=2"),
            [Knob("batch_size", "--batch-size", 2)],
        ),
        (
            "@click.option('--batch-size', '-b', default=2 * 16)\ndef main(): ...",
            (),
            [Knob("batch_size", "--batch-size", 32)],
        ),
        ("p.add_argument('--batch-size', type=int, required=True)", (), []),
        ("p.add_argument('--batch-size', default=BATCH)", (), []),
        (
            "p.add_argument('--eval-batch-size', default=4)\np.add_argument('--bsz', default=2)",
            (),
            [Knob("batch_size", "--bsz", 2)],
        ),
        (
            "",
            ("train.micro_batch_size=4", "--data.seq-len", "64"),
            [
                Knob("batch_size", "train.micro_batch_size", 4),
                Knob("sequence_length", "--data.seq-len", 64),
            ],
        ),
        ("", ("train.bs=4", "eval.bs=8"), []),
        ("", ("bs=4", "eval.bs=8"), [Knob("batch_size", "bs", 4)]),
        ("this is not Python", ("--batch", "3"), [Knob("batch_size", "--batch", 3)]),
    ],
)
def test_options(tmp_path: Path, source: str, argv: tuple[str, ...], knobs: list[Knob]) -> None:
    assert find_knobs(script(tmp_path, source, *argv)) == knobs


def test_a_dotted_accumulation() -> None:
    program = ScriptTarget("script", "no.py", ("--trainer.accumulate_grad_batches=2",))
    assert find_accumulation(program) == NumericOption("--trainer.accumulate_grad_batches", 2)


def test_fields_of_hugging_face(tmp_path: Path) -> None:
    source = """
@dataclass
class DataArguments:
    block_size: int = field(default=1024, metadata={"help": "tokens"})
    text: str = ""

parser = HfArgumentParser((DataArguments, TrainingArguments))
"""
    assert find_knobs(script(tmp_path, source)) == [
        Knob("batch_size", "--per_device_train_batch_size", 8),
        Knob("sequence_length", "--block_size", 1024),
    ]
    without = source.replace("HfArgumentParser", "print")
    assert find_knobs(script(tmp_path, without)) == []


def test_a_module_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    (package / "train.py").write_text("p.add_argument('--batch-size', default=4)")
    monkeypatch.chdir(tmp_path)
    program = ScriptTarget("module", "some_package.train")
    assert find_knobs(program) == [Knob("batch_size", "--batch-size", 4)]
    assert find_knobs(ScriptTarget("module", "no_such_package.train")) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--batch-size 2"),
        ("--lr 8", "--lr 8 --batch-size 2"),
        ("--batch-size 8 x", "--batch-size 2 x"),
        ("--batch-size=8 x", "--batch-size=2 x"),
        ("--batch-size 8 --batch-size 4", "--batch-size 8 --batch-size 2"),
    ],
)
def test_another_value(before: str, after: str) -> None:
    program = ScriptTarget("script", "train.py", tuple(before.split()))
    changed = program.with_option("--batch-size", 2)
    assert changed == ScriptTarget("script", "train.py", tuple(after.split()))
