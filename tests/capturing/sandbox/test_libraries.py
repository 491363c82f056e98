"""Real libraries that write and call out, where they are installed."""

from __future__ import annotations

import os
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.capturing.sandbox import Sandbox


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("as_uri", [False, True])
def test_sqlite(empty: Path, as_uri: bool) -> None:
    with Sandbox():
        name = f"file:{empty}/runs.db?mode=rwc" if as_uri else str(empty / "runs.db")
        database = sqlite3.connect(name, uri=as_uri)
        with database:
            database.execute("create table runs (loss real)")
            database.execute("insert into runs values (0.5)")
        database.close()
        again = sqlite3.connect(empty / "runs.db")
        assert again.execute("select loss from runs").fetchone() == (0.5,)
        again.close()
        assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)


def test_tokenizers(empty: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    with Sandbox():
        model = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
        tokenizers.Tokenizer(model).save(str(empty / "tokenizer.json"))
        again = tokenizers.Tokenizer.from_file(str(empty / "tokenizer.json"))
        assert again.get_vocab() == {"a": 0, "b": 1}
        (empty / "vocab.txt").write_text("[UNK]\nword")
        read = tokenizers.models.WordPiece.read_file(vocab=str(empty / "vocab.txt"))
        assert read == {"[UNK]": 0, "word": 1}
        assert again.model.save(str(empty)) == [str(empty / "vocab.json")]
        assert (empty / "vocab.json").read_text() == '{"a":0,"b":1}'
        made = tokenizers.models.WordPiece(str(empty / "vocab.txt"), unk_token="[UNK]")
        again, kind = pickle.loads(pickle.dumps((made, tokenizers.models.WordPiece)))
        assert isinstance(again, kind)
        assert again.token_to_id("word") == 1


@pytest.fixture
def transformers() -> Any:
    module = pytest.importorskip("transformers")
    try:
        return module if module.GPT2LMHeadModel and module.Trainer else None
    except ImportError as problem:
        pytest.skip(f"transformers cannot be used here: {problem}")


def test_transformers_save_pretrained(empty: Path, transformers: Any) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    with Sandbox():
        model = transformers.GPT2LMHeadModel(config)
        model.save_pretrained(empty / "real")
        assert sorted(os.listdir(empty / "real"))[0] == "config.json"
        again = transformers.GPT2LMHeadModel.from_pretrained(empty / "real")
        assert torch.equal(again.lm_head.weight, model.lm_head.weight)
        model.to("meta").save_pretrained(empty / "fake")
        assert "model.safetensors" in os.listdir(empty / "fake")


def test_transformers_trainer_rotates_its_checkpoints(empty: Path, transformers: Any) -> None:
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    row = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}
    with Sandbox():
        arguments = transformers.TrainingArguments(
            output_dir=str(empty / "out"),
            max_steps=6,
            save_steps=2,
            save_total_limit=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model = transformers.GPT2LMHeadModel(config)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=[row] * 8)
        trainer.train()
        kept = sorted(p.name for p in (empty / "out").glob("checkpoint-*"))
        assert kept == ["checkpoint-4", "checkpoint-6"]
        assert "trainer_state.json" in os.listdir(empty / "out/checkpoint-6")
        trainer.train(resume_from_checkpoint=str(empty / "out/checkpoint-4"))
        trainer.save_model()


def test_accelerate_save_state(empty: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    with Sandbox(), FakeTensorMode(allow_non_fake_inputs=True):
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        prepared = accelerate.Accelerator(cpu=True)
        prepared._models, prepared._optimizers = [model], [optimizer]
        model(torch.empty(2, 8)).sum().backward()
        optimizer.step()
        prepared.save_state(str(empty / "state"))
        assert {"model.safetensors", "optimizer.bin"} <= set(os.listdir(empty / "state"))
        prepared.load_state(str(empty / "state"))


def test_tensorboard(empty: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with Sandbox():
        writer = SummaryWriter(str(empty / "runs"))
        for step in range(10):
            writer.add_scalar("loss", 1 / (step + 1), step)
        writer.flush()
        events = list((empty / "runs").glob("events.out.tfevents.*"))
        assert len(events) == 1
        assert events[0].stat().st_size > 100
        writer.close()


def test_wandb_even_when_told_to_be_online(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    monkeypatch.chdir(empty)
    with Sandbox() as box:
        assert wandb.login()
        run = wandb.init(project="p", mode="online", dir=str(empty))
        run.log({"loss": 1.0})
        wandb.log({"loss": 0.5})
        run.finish()
        assert box.refused == []


def test_hdf5(empty: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with Sandbox():
        with h5py.File(empty / "x.h5", "w") as file:
            file["x"] = [1, 2, 3]
        with h5py.File(empty / "x.h5", "a") as file:
            file["y"] = [4]
        with h5py.File(empty / "x.h5", "r") as file:
            assert list(file["x"][:]) == [1, 2, 3]
            assert list(file["y"][:]) == [4]


def test_arrow(empty: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"x": [1, 2]})
    with Sandbox():
        for name in ("x.parquet", "y.parquet"):
            parquet.write_table(table, empty / name)
            assert parquet.read_table(empty / name).to_pydict() == {"x": [1, 2]}
        with (
            (empty / "x.arrow").open("wb") as file,
            arrow.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
        mapped = arrow.ipc.open_stream(arrow.memory_map(str(empty / "x.arrow")))
        assert mapped.read_all().to_pydict() == {"x": [1, 2]}


def test_pandas(empty: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with Sandbox():
        pandas.DataFrame({"x": [1, 2]}).to_csv(empty / "x.csv", index=False)
        assert list(pandas.read_csv(empty / "x.csv")["x"]) == [1, 2]


def test_profiler_traces(empty: Path) -> None:
    with Sandbox():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.zeros(3).sum()
        profile.export_chrome_trace(str(empty / "trace.json"))
        assert (empty / "trace.json").stat().st_size > 0


IMPORTED_INSIDE = """
import sys
from pathlib import Path
from memplan.capturing.sandbox import Sandbox
out = Path(sys.argv[1])
with Sandbox():
    import sqlite3, torch
    torch.save(torch.empty(3, device="meta"), out / "x.pt")
    assert torch.load(out / "x.pt").device.type == "meta"
    sqlite3.connect(out / "x.db").execute("create table t (x)")
    assert (out / "x.db").exists()
    inside = [torch.save]
print(torch.save is inside[0], torch.save is inside[0].__wrapped__, list(out.iterdir()))
"""


def test_libraries_imported_by_the_script(empty: Path) -> None:
    source = str(Path(sys.modules["memplan.capturing.sandbox"].__file__ or "").parents[3])
    environment = os.environ | {"PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_INSIDE, str(empty)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.stdout == "False True []\n", done.stderr
