"""Connections that would leave this machine, and those that stay on it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import threading
import types
import urllib.error
import urllib.request

import pytest

from memplan.capturing.sandbox import Sandbox

OUTSIDE = "192.0.2.1"  # Reserved for documentation: routed nowhere.


def test_connections_outside_are_refused_at_once() -> None:
    with Sandbox() as box:
        with pytest.raises(OSError, match="unreachable") as caught:
            socket.create_connection((OUTSIDE, 443), timeout=30)
        assert caught.value.errno == errno.ENETUNREACH
        with socket.socket() as plain:
            assert plain.connect_ex((OUTSIDE, 80)) == errno.ENETUNREACH
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram, pytest.raises(OSError):
            datagram.sendto(b"x", (OUTSIDE, 53))
        assert box.refused == [f"{OUTSIDE}:443", f"{OUTSIDE}:80", f"{OUTSIDE}:53"]


def test_names_are_not_looked_up() -> None:
    with Sandbox() as box:
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo("huggingface.co", 443)
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen("https://example.org/model.bin", timeout=30)
        with pytest.raises(OSError, match="not known"):
            asyncio.run(asyncio.open_connection("example.com", 80))
        assert box.refused == ["huggingface.co:443", "example.org:443", "example.com:80"]


def test_loopback_works() -> None:
    with Sandbox() as box, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(("localhost", port), timeout=10) as client:
            assert client.recv(5) == b"hello"
        thread.join()
        left, right = socket.socketpair()
        left.sendall(b"x")
        assert right.recv(1) == b"x"
        left.close()
        right.close()
        assert socket.getaddrinfo(socket.gethostname(), None) is not None
        assert box.refused == []


def test_a_proxy_on_this_machine_is_not_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    with Sandbox():
        assert "https_proxy" not in os.environ
    assert os.environ["https_proxy"] == "http://127.0.0.1:3128"


def test_a_forked_worker_reports_what_it_was_refused() -> None:
    with Sandbox() as box:
        pid = os.fork()
        if pid == 0:
            try:
                socket.create_connection((OUTSIDE, 7))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert box.refused == [f"{OUTSIDE}:7"]


def test_libraries_are_told_to_stay_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = types.ModuleType("huggingface_hub.constants")
    constants.HF_HUB_OFFLINE = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with Sandbox():
        assert constants.HF_HUB_OFFLINE
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert os.environ["WANDB_MODE"] == "disabled"
    assert not constants.HF_HUB_OFFLINE
    assert os.environ["WANDB_MODE"] == "online"
    assert "HF_HUB_OFFLINE" not in os.environ


def test_the_network_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with Sandbox(allow_network=True) as box:
        assert "HF_HUB_OFFLINE" not in os.environ
        assert os.environ["WANDB_MODE"] == "disabled"
        with socket.socket() as plain:
            plain.settimeout(0.01)
            plain.connect_ex((OUTSIDE, 80))
        assert box.refused == []
