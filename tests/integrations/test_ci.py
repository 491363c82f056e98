"""The GitHub Action and the GitLab job, by their own scripts, on a real repository; the services
are stood in for by a server that keeps comments as theirs do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.integrations import ci, ci_comment
from memplan.types.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import torch
from widths import WIDTH
assert open("data/size.txt").read() == "64"
net = torch.nn.Sequential(torch.nn.Linear(512, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8))
net = net.cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(6):
    net(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WORDS = "--gpu 24GiB train.py"


class Comments(BaseHTTPRequestHandler):
    """Of one request. What is written goes to `kept`, by number."""

    kept: dict[int, str]
    token: str
    replaces: str

    def do_GET(self) -> None:
        page = int(re.search(r"[?&]page=(\d+)", self.path)[1])  # type: ignore[index]
        found = [{"id": number, "body": body} for number, body in self.kept.items()]
        self._answer(200, found[(page - 1) * 100 : page * 100])

    def do_POST(self) -> None:
        self._write(max(self.kept, default=0) + 1)

    def do_PATCH(self) -> None:
        self._replace("PATCH")

    def do_PUT(self) -> None:
        self._replace("PUT")

    def _replace(self, method: str) -> None:
        assert method == self.replaces
        self._write(int(self.path.rpartition("/")[2]))

    def _write(self, number: int) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]
        given = self.headers["Authorization"] or self.headers["PRIVATE-TOKEN"]
        if given.removeprefix("Bearer ") != self.token:
            self._answer(403, {"message": "Resource not accessible"})
            return
        self.kept[number] = body
        self._answer(201, {"id": number})

    def _answer(self, code: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def comments() -> Iterator[tuple[type[Comments], str]]:
    others = dict.fromkeys(range(1, 151), "another's")
    handler = type("Kept", (Comments,), {"kept": others, "token": "secret", "replaces": "PATCH"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ("git", *own, *words), cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 1024 in the base and of 16384 in the change, in a folder of the repository, with
    data that git does not hold."""
    folder = tmp_path_factory.mktemp("repository") / "job"
    (folder / "src").mkdir(parents=True)
    (folder / "train.py").write_text(JOB)
    (folder / ".gitignore").write_text("data/\n__pycache__/\n")
    git(folder.parent, "init", "-q")
    for width in (1024, 16384):
        (folder / "src" / "widths.py").write_text(f"WIDTH = {width}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", f"width {width}")
    (folder / "data").mkdir()
    (folder / "data" / "size.txt").write_text("64")
    return folder


def bash(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a runner does it."""
    mine = {key: text for key, text in os.environ.items() if not key.startswith(("CI_", "GITHUB"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script),
        cwd=folder,
        env=mine | {"PATH": path} | environment,
        capture_output=True,
        text=True,
    )


def action(repository: Path, inputs: dict[str, str], **environment: str) -> Any:
    """The action's last step, with its expressions filled in as GitHub does."""
    made = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert inputs.keys() <= made["inputs"].keys()
    values = {name: each.get("default", "") for name, each in made["inputs"].items()} | inputs
    step = made["runs"]["steps"][-1]

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)

    given = {name: filled(text) for name, text in step["env"].items()}
    folder = repository.parent / filled(step["working-directory"])
    return bash(step["run"], folder, **given, **environment)


def test_the_action(repository: Path, tmp_path: Path, comments: tuple[type[Comments], str]) -> None:
    handler, address = comments
    summary, event = tmp_path / "summary.md", tmp_path / "event.json"
    event.write_text('{"pull_request": {"number": 7}}')
    inputs = {
        "estimate": WORDS,
        "base": git(repository, "rev-parse", "HEAD~1"),
        "share": "data",
        "working-directory": "job",
        "token": "secret",
    }
    environment = {
        "GITHUB_API_URL": address,
        "GITHUB_REPOSITORY": "a/b",
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    done = action(repository, inputs, **environment)
    assert done.returncode == 0, done.stderr
    text = handler.kept.pop(151)
    lines = text.splitlines()
    assert lines[0] == f"<!-- memplan: {WORDS.replace('--', '- -')} -->"
    assert lines[2].startswith("`peak ") and "24.0 GiB: fits" in lines[2]
    assert lines[4].startswith("**GPU memory: peak +")
    assert re.search(r"<code>optimizer state</code> \| \d+ MiB \| 6\d MiB \| \+\d+ MiB", text), text
    assert "train.py:" in text and "~~~" not in text
    assert summary.read_text() == text
    assert git(repository, "worktree", "list").count("\n") == 0
    assert git(repository, "status", "--porcelain") == ""

    handler.kept[140] = f"{lines[0]}\nof a run before"
    handler.token = "another"
    done = action(
        repository, inputs | {"estimate": WORDS.replace("train", "nosuch")}, **environment
    )
    assert done.returncode == 2 and "no comment was written: HTTP 403" in done.stderr
    assert "no script nosuch.py" in summary.read_text()


def test_the_job_for_gitlab(repository: Path, comments: tuple[type[Comments], str]) -> None:
    handler, address = comments
    handler.replaces = "PUT"
    handler.kept[140] = f"{ci.marker('--gpu 512MiB train.py')}\nof a run before"
    job = yaml.safe_load((ROOT / "docs" / "gitlab-ci.yml").read_text(encoding="utf-8"))["memplan"]
    done = bash(
        "\n".join(job["script"]),
        repository,
        MEMPLAN_ESTIMATE="--gpu 512MiB train.py",
        CI_MERGE_REQUEST_DIFF_BASE_SHA=git(repository, "rev-parse", "HEAD~1"),
        CI_MERGE_REQUEST_IID="3",
        CI_API_V4_URL=address,
        CI_PROJECT_ID="5",
        MEMPLAN_TOKEN="secret",
    )
    text = handler.kept[140]
    assert done.returncode == 3, "it does not fit"
    assert ": does not fit" in text
    assert "memplan has no answer for its base" in text and "data/size.txt" in text
    assert len(handler.kept) == 150, "the comment of the run before is renewed"


def test_a_job_is_found_by_its_own_words() -> None:
    assert ci.marker("--gpu h100 a.py") != ci.marker("--gpu h100 b.py")
    assert ci.marker("a --> b").count("-->") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base", ""], "--base is empty"),
        (["--base", "nosuchcommit"], "git fetch"),
        (["--base", "HEAD", "--share", "/etc"], "--share /etc"),
    ],
)
def test_what_is_refused(
    repository: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(repository)
    assert ci.main(["--estimate", "train.py", *words]) == 2
    assert message in capsys.readouterr().err
    assert git(repository, "worktree", "list").count("\n") == 0


def test_outside_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "event.json").write_text("{}")
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(tmp_path / "event.json"))
    with pytest.raises(UsageError, match="no pull request"):
        ci_comment.post("github", "text", "marker")
    monkeypatch.delenv("CI_API_V4_URL", raising=False)
    with pytest.raises(UsageError, match="CI_API_V4_URL"):
        ci_comment.post("gitlab", "text", "marker")
