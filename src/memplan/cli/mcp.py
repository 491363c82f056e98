"""Serve estimate, fit, diff and explain to agents, over the Model Context Protocol.

Reads requests on stdin and answers on stdout, as an agent's host starts it (docs/agents.md).
Nothing is written unless --allow-write is given: captured scripts run in the sandbox, without the
network.
"""

from __future__ import annotations

import argparse

from memplan.cli.command import EXIT_YES
from memplan.types.errors import UsageError

TAKES_PROGRAM = False


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-write", action="store_true", help="let fit write plans, where there is no file yet"
    )


def run(args: argparse.Namespace) -> int:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "memplan mcp needs the package mcp, which is not installed",
            "pip install 'memplan[mcp]'",
        ) from error
    from memplan.cli.mcp_server import serve

    serve(allow_write=args.allow_write)
    return EXIT_YES
