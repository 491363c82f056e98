"""Syntax that is put into a job's files, as if it stood at another node's place."""

from __future__ import annotations

import ast
from typing import Any


def statement(text: str, place: ast.AST) -> Any:
    (parsed,) = ast.parse(text).body
    for node in ast.walk(parsed):
        ast.copy_location(node, place)
    return parsed


def expression(text: str, place: ast.AST) -> Any:
    return statement(text, place).value
