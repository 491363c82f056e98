"""What native code does with files, against the same on the disk."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memplan.capturing.sandbox import Sandbox

SOURCE = r"""
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

extern "C" {
// Each returns what the C library does, or minus the error's number.
int result(int code) { return code < 0 ? -errno : code; }

int put(const char* path, const char* text, int flags) {
  int file = open(path, O_WRONLY | flags, 0644);
  if (file < 0) return -errno;
  int written = (int)write(file, text, std::string(text).size());
  close(file);
  return written;
}
int get(const char* path, char* into, int most) {
  FILE* file = fopen(path, "rb");
  if (file == nullptr) return -errno;
  int got = (int)fread(into, 1, (size_t)most, file);
  fclose(file);
  return got;
}
int stream(const char* path, const char* text, int) {
  std::ofstream file(path, std::ios::app);
  file << text;
  return file.good() ? 0 : -1;
}
int kind(const char* path) {
  struct stat status;
  if (stat(path, &status) != 0) return -errno;
  return S_ISDIR(status.st_mode) ? 2 : 1;
}
int exists(const char* path) { return std::filesystem::exists(path); }
int reachable(const char* path) { return result(access(path, R_OK)); }
int drop(const char* path) { return result(remove(path)); }
int drop_folder(const char* path) { return result(rmdir(path)); }
int folder(const char* path) { return result(mkdir(path, 0755)); }
int mode(const char* path) { return result(chmod(path, 0600)); }
int cut(const char* path) { return result(truncate(path, 1)); }
int move(const char* path, const char* to, int) { return result(rename(path, to)); }
int hard(const char* path, const char* to, int) { return result(link(path, to)); }
int lists(const char* path) {
  DIR* all = opendir(path);
  if (all == nullptr) return -errno;
  closedir(all);
  return 0;
}
int put_in_a_thread(const char* path, const char* text, int flags) {
  int code = 0;
  std::thread([&] { code = put(path, text, flags); }).join();
  return code;
}
int get_in_a_thread(const char* path, char* into, int most) {
  int code = 0;
  std::thread([&] { code = get(path, into, most); }).join();
  return code;
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    (folder / "files.cpp").write_text(SOURCE)
    made = folder / "libfiles.so"
    command = ("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-o")
    subprocess.run((*command, made, folder / "files.cpp"), check=True)
    return made


def read(native: Any, path: Path, name: str = "get") -> bytes | int:
    into = ctypes.create_string_buffer(64)
    got = getattr(native, name)(os.fsencode(path), into, 64)
    return into.raw[:got] if got >= 0 else got


def tree(top: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(top)): None if path.is_dir() else path.read_bytes()
        for path in sorted(top.rglob("*"))
    }


NAMES = ("a", "b", "folder", "folder/a", "folder/b", "folder/inner", "old", "kept/old", "none/a")
ON_ONE = ("kind", "exists", "reachable", "drop", "drop_folder", "folder", "mode", "cut", "lists")
FLAGS = (os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_APPEND, os.O_CREAT | os.O_EXCL, 0)


def trial(native: Any, top: Path, seed: int) -> list[Any]:
    """The results of random calls, some of Python's between them."""
    draw = random.Random(seed)
    results: list[Any] = []
    for _ in range(60):
        path, other = (top / draw.choice(NAMES) for _ in range(2))
        call = draw.choice((*ON_ONE, "put", "stream", "get", "move", "hard", "python"))
        if call in ("put", "stream"):
            flags = draw.choice(FLAGS)
            result = getattr(native, call)(os.fsencode(path), b"text", flags)
        elif call == "get":
            result = read(native, path)
        elif call in ("move", "hard"):
            result = getattr(native, call)(os.fsencode(path), os.fsencode(other), 0)
        elif call == "python":
            try:
                result = path.write_text("Python's")
            except OSError as error:
                result = error.errno
        else:
            result = getattr(native, call)(os.fsencode(path))
        results.append((call, path.relative_to(top), result))
    return [*results, tree(top)]


def start(top: Path) -> Path:
    (top / "kept").mkdir(parents=True)
    (top / "old").write_text("old")
    (top / "kept" / "old").write_text("older")
    return top


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(library: Path, tmp_path: Path, seed: int) -> None:
    native = ctypes.CDLL(str(library))
    expected = trial(native, start(tmp_path / "disk"), seed)
    untouched = tree(start(tmp_path / "view"))
    with Sandbox():
        assert trial(native, tmp_path / "view", seed) == expected
    assert tree(tmp_path / "view") == untouched


@pytest.fixture
def native(library: Path) -> Iterator[Any]:
    with Sandbox():
        yield ctypes.CDLL(str(library))


def test_afterwards_calls_reach_the_disk(library: Path, tmp_path: Path) -> None:
    native = ctypes.CDLL(str(library))
    for _ in range(2):
        with Sandbox():
            assert native.put(os.fsencode(tmp_path / "a"), b"text", os.O_CREAT) == 4
        assert not native.exists(os.fsencode(tmp_path / "a"))
    assert native.put(os.fsencode(tmp_path / "b"), b"text", os.O_CREAT) == 4
    assert (tmp_path / "b").read_text() == "text"


def test_a_library_that_the_script_builds(library: Path, tmp_path: Path) -> None:
    with Sandbox():
        copy = tmp_path / "libcopy.so"
        copy.write_bytes(library.read_bytes())
        built = ctypes.CDLL(str(copy))
        assert built.put(os.fsencode(tmp_path / "a"), b"text", os.O_CREAT) == 4
        assert (tmp_path / "a").read_text() == "text"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("relative", [False, True])
def test_below_a_working_directory_of_the_overlay(
    native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    Path("a").write_text("text")
    assert read(native, Path("a") if relative else tmp_path / "made" / "a") == b"text"
    assert native.put(b"../b", b"text", os.O_CREAT) == 4
    assert Path("../b").read_text() == "text"
    monkeypatch.chdir("/")


def test_through_a_link(native: Any, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "link").symlink_to("made")
    (tmp_path / "made" / "a").write_text("text")
    assert read(native, tmp_path / "link" / "a") == b"text"


def test_threads_of_native_code(
    native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is waited for with the interpreter's lock held can read."""
    path = tmp_path / "a"
    assert native.put_in_a_thread(os.fsencode(path), b"text", os.O_CREAT) == 4
    assert read(native, path, "get_in_a_thread") == b"text"
    holding = ctypes.PyDLL(native._name)
    assert read(holding, path, "get_in_a_thread") == b"text"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b").write_text("more")
    for folder, name in ((tmp_path, "folder/b"), (tmp_path / "folder", "b")):
        monkeypatch.chdir(folder)
        assert read(holding, Path(name), "get_in_a_thread") == b"more"
    monkeypatch.chdir("/")
    assert read(holding, Path(__file__), "get_in_a_thread") == Path(__file__).read_bytes()[:64]


def test_an_interrupt_while_a_call_is_answered(
    native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruptible: None
) -> None:
    real = os.open

    def interrupted(*args: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assert native.put(os.fsencode(tmp_path / "a"), b"text", os.O_CREAT) == -errno.EIO
        threading.Event().wait(5)


def test_a_forked_child(native: Any, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(native.put(os.fsencode(tmp_path / "a"), b"text", os.O_CREAT) != 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(native, tmp_path / "a") == b"text"


def test_the_command_line(library: Path, tmp_path: Path) -> None:
    """Under Landlock, too, where a write to the disk would be refused."""
    script = tmp_path / "train.py"
    script.write_text(
        "import ctypes, os, torch\n"
        f"native = ctypes.CDLL({str(library)!r})\n"
        "assert native.put(b'data.bin', b'text', os.O_CREAT) == 4\n"
        "assert open('data.bin').read() == 'text'\n"
        "w = torch.ones(1 << 20, device='cuda', requires_grad=True)\n"
        "(w * 2).sum().backward()\n"
    )
    words = (sys.executable, "-m", "memplan", "estimate", "--gpu", "h100", str(script))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == ["train.py"]
