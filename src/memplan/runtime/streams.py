"""Streams for copies, and events between them; None for devices that have no streams."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def new(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def record(stream: Any) -> Any:
    return stream.record_event() if stream is not None else None


def wait(stream: Any, event: Any) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)
