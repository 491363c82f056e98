"""`memplan mcp`: the tools of `mcp_tools` over stdio, each call a process of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import mcp_types as protocol
import msgspec
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from memplan import __version__
from memplan.cli.command import EXIT_NO, EXIT_YES
from memplan.cli.mcp_tools import Call, read_call, text_of, tools
from memplan.cli.schemas import schema_of
from memplan.types.errors import MemplanError, NoAnswerError, UsageError

_INSTRUCTIONS = (
    "memplan tells how much GPU memory a PyTorch training job needs, without a GPU, and makes it "
    "fit. Sizes are bytes. `high_bytes` is what to trust before renting a card: fits is about it."
)
_SECONDS_TO_END = 10
_LONGEST_ERROR = 4000


def serve(*, allow_write: bool) -> None:
    """Answer on stdin and stdout until stdin ends."""
    offered = tools(allow_write=allow_write)
    one_at_a_time = anyio.Lock()  # a capture takes the memory of what the script reads

    async def list_tools(_: Any, __: Any) -> protocol.ListToolsResult:
        return protocol.ListToolsResult(tools=[_tool(*each) for each in offered.items()])

    async def call_tool(_: Any, params: protocol.CallToolRequestParams) -> protocol.CallToolResult:
        try:
            if params.name not in offered:
                raise UsageError(f"no tool {params.name!r}", f"one of {', '.join(offered)}")
            call = read_call(offered[params.name], params.arguments or {})
            async with one_at_a_time:
                answer = call.shortened(await _ask(call))
        except MemplanError as error:
            return protocol.CallToolResult(content=[_text(str(error))], is_error=True)
        return protocol.CallToolResult(
            content=[_text(text_of(answer))], structured_content=msgspec.to_builtins(answer)
        )

    server: Server[Any] = Server(
        "memplan",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )

    async def main() -> None:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(main)


def _tool(name: str, kind: type[Call]) -> protocol.Tool:
    _, parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return protocol.Tool(
        name=name,
        description=" ".join((kind.__doc__ or "").split()),
        input_schema=parts.pop(kind.__name__),
        output_schema=schema_of(kind.schema),
        annotations=protocol.ToolAnnotations(
            read_only_hint="plan" not in kind.__struct_fields__,
            destructive_hint=False,
            open_world_hint=False,
        ),
    )


def _text(text: str) -> protocol.TextContent:
    return protocol.TextContent(type="text", text=text)


async def _ask(call: Call) -> Any:
    """The answer of a command. Raises UsageError for a folder that is none, and NoAnswerError with
    what the command said where it has no answer."""
    if not Path(call.folder).is_dir():
        raise UsageError(f"no folder {call.folder}", "the one that the command is typed in")
    name, *words = call.words()
    # Not -m: the folder's own modules would be found before memplan's.
    command = [sys.executable, "-P", "-m", "memplan", name, "--json", *words]
    async with await anyio.open_process(
        command, cwd=call.folder, stdin=subprocess.DEVNULL
    ) as process:
        try:
            said = await _outputs(process)
        except BaseException:  # the agent has gone, or asks no more
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SECONDS_TO_END):
                with suppress(ProcessLookupError):
                    process.terminate()  # it ends the captures that it started
                await process.wait()
            raise
    if process.returncode not in (EXIT_YES, EXIT_NO):
        text = said["err"].decode(errors="replace")
        _, found, complaint = text.rpartition("memplan: error: ")
        raise NoAnswerError((complaint if found else text)[-_LONGEST_ERROR:].strip())
    return msgspec.json.decode(said["out"], type=call.answers)


async def _outputs(process: anyio.abc.Process) -> dict[str, bytes]:
    said = {"out": bytearray(), "err": bytearray()}

    async def read(name: str, stream: anyio.abc.ByteReceiveStream | None) -> None:
        assert stream is not None
        async for chunk in stream:
            said[name] += chunk

    async with anyio.create_task_group() as both:
        both.start_soon(read, "out", process.stdout)
        both.start_soon(read, "err", process.stderr)
    await process.wait()
    return {name: bytes(text) for name, text in said.items()}
