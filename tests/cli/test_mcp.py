"""`memplan mcp` as agents use it: the protocol's own client, over stdio."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import jsonschema
import msgspec
import pytest
from mcp import Client, StdioServerParameters

from memplan.cli import main, mcp_server
from memplan.cli.mcp_tools import read_call, tools
from memplan.estimation import estimate
from memplan.types.errors import UsageError
from tests.capturing.importers.snapshot_maker import MIB
from tests.capturing.importers.test_out_of_memory import fragmented
from tests.estimation.test_difference import layers
from tests.schemas import read_answer

SCRIPT = """
import os, sys, torch
print("the script's own words", sys.argv[1:])
os.write(1, b"past Python's stdout")
open("written.txt", "w").write("by the script")
net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(6):
    net(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
Found = TypeVar("Found")


def asked(ask: Callable[[Client], Awaitable[Found]], *words: str) -> Found:
    """What `ask` gets from a server that it started."""
    server = StdioServerParameters(command=sys.executable, args=["-m", "memplan", "mcp", *words])

    async def connected() -> Found:
        async with Client(server) as client:
            return await ask(client)

    return anyio.run(connected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, mib in (("before", 16), ("after", 48)):
        content = msgspec.json.encode(estimate(layers(activation=mib)))
        (tmp_path / f"{name}.json").write_bytes(content)
    return tmp_path


def test_a_session(folder: Path) -> None:
    (folder / "oom.pickle").write_bytes(pickle.dumps(fragmented().snapshot()))
    here = {"folder": str(folder)}
    job = {**here, "command": ["train.py", "--json", "-o", "x"]}

    async def ask(client: Client) -> dict[str, Any]:
        async def call(name: str, **arguments: object) -> Any:
            return await client.call_tool(name, arguments)

        return {
            "tools": (await client.list_tools()).tools,
            "estimate": await call("estimate", **job, gpu="rtx4090"),
            "fit": await call("fit", **job, gpu="24GiB"),
            "diff": await call("diff", **here, before="before.json", after="after.json"),
            "explain": await call("explain", **here, snapshot="oom.pickle"),
            "missing": await call("estimate", **here, command=["nosuch.py"]),
            "plan": await call("fit", **job, gpu="24GiB", plan="job.plan"),
        }

    found = asked(ask)
    schemas = {tool.name: tool for tool in found.pop("tools")}
    assert schemas.keys() == {"estimate", "fit", "diff", "explain"}
    assert all(tool.annotations.read_only_hint for tool in schemas.values())
    for name, schema in (("estimate", "estimate"), ("fit", "fit"), ("diff", "diff"),
                         ("explain", "estimate-from-snapshot")):  # fmt: skip
        assert not found[name].is_error, found[name].content
        answer = found[name].structured_content
        read_answer(schema, msgspec.json.encode(answer))
        jsonschema.validate(answer, schemas[name].output_schema)
    answer = found["estimate"].structured_content
    assert answer["fits"] and answer["command"] == ["train.py", "--json", "-o", "x"]
    assert answer["held"] == [] and len(msgspec.json.encode(answer)) < 10_000
    assert found["estimate"].content[0].text.startswith("peak ")
    assert "at the peak" in found["estimate"].content[0].text
    assert found["fit"].structured_content["fits"]
    assert found["diff"].structured_content["change_bytes"] > 0
    assert found["explain"].structured_content["asked_bytes"] == 30 * MIB
    for name, words in (("missing", "no script nosuch.py"), ("plan", "--allow-write")):
        assert found[name].is_error and words in found[name].content[0].text
    kept = {"train.py", "before.json", "after.json", "oom.pickle"}
    assert {path.name for path in folder.iterdir()} == kept


def test_a_call_that_is_cancelled_ends_its_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").write_text("import time\ntime.sleep(600)\n")
    call = read_call(
        tools(allow_write=False)["estimate"], {"command": ["train.py"], "folder": str(folder)}
    )
    open_process, started = anyio.open_process, []

    async def noted(*words: Any, **options: Any) -> anyio.abc.Process:
        started.append(await open_process(*words, **options))
        return started[-1]

    async def cancelled() -> None:
        with anyio.move_on_after(1):
            await mcp_server._ask(call)

    monkeypatch.setattr(anyio, "open_process", noted)
    anyio.run(cancelled)
    assert started[0].returncode is not None


def test_what_is_allowed_is_offered() -> None:
    kind = tools(allow_write=True)["fit"]
    call = read_call(kind, {"command": ["-m", "job"], "gpu": "h100", "plan": "-f"})
    assert call.words() == ["fit", "--output=-f", "--gpu=h100", "--allow=exact", "-m", "job"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("estimate", {}, "command"),
        ("estimate", {"command": []}, "length >= 1"),
        ("estimate", {"command": ["x.py"], "force": True}, "force"),
        ("estimate", {"command": "x.py"}, "array"),
        ("fit", {"command": ["x.py"], "gpu": "h100", "plan": "a.plan"}, "--allow-write"),
        ("diff", {"before": "a"}, "after"),
    ],
)
def test_other_arguments_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_call(tools(allow_write=False)[name], arguments)
    assert message in str(refused.value)


def test_words_of_a_call_are_no_options_of_memplans() -> None:
    call = read_call(
        tools(allow_write=False)["estimate"], {"command": ["-o", "x", "train.py"], "gpu": "--force"}
    )
    assert call.words() == ["estimate", "--gpu=--force", "--", "-o", "x", "train.py"]
    call = read_call(tools(allow_write=False)["diff"], {"before": "--format", "after": "html"})
    assert call.words() == ["diff", "--", "--format", "html"]


def test_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert main(["mcp"]) == 2
    assert "pip install 'memplan[mcp]'" in capsys.readouterr().err
