"""A comment under the pull or merge request that a CI job runs for: written once, then renewed."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.types.errors import UsageError

SERVICES = ("github", "gitlab")
_PAGE = 100
_MOST_PAGES = 50
_SECONDS = 30


@dataclass(frozen=True)
class Thread:
    """The address of a request's comments, and how to find and replace one of them."""

    all: str
    """The address to list the request's comments and to add one."""
    one: str
    replaces: str
    headers: dict[str, str]


def post(service: str, text: str, marker: str) -> None:
    """Write the comment, over the one that begins with the same marker where there is one.

    A service that refuses (a fork's token may not write) is told of on stderr, for the answer
    stands elsewhere too. Raises UsageError outside a pull or merge request.
    """
    thread = _github() if service == "github" else _gitlab()
    try:
        number = _existing(thread, marker)
        if number is None:
            _ask(thread, "POST", thread.all, {"body": text})
        else:
            _ask(thread, thread.replaces, f"{thread.one}/{number}", {"body": text})
    except urllib.error.HTTPError as error:
        said = f"HTTP {error.code} of {service}: the token may not write comments?"
        print(f"memplan: no comment was written: {said}", file=sys.stderr)
    except OSError as error:
        print(f"memplan: no comment was written: {error}", file=sys.stderr)


def _github() -> Thread:
    event = json.loads(Path(_variable("GITHUB_EVENT_PATH")).read_text(encoding="utf-8"))
    number = event.get("pull_request", {}).get("number")
    if number is None:
        raise UsageError("--post github: this job runs for no pull request", "on: pull_request")
    issues = f"{_variable('GITHUB_API_URL')}/repos/{_variable('GITHUB_REPOSITORY')}/issues"
    headers = {
        "Authorization": f"Bearer {_variable('GITHUB_TOKEN')}",
        "Accept": "application/vnd.github+json",
    }
    return Thread(f"{issues}/{number}/comments", f"{issues}/comments", "PATCH", headers)


def _gitlab() -> Thread:
    project = f"{_variable('CI_API_V4_URL')}/projects/{_variable('CI_PROJECT_ID')}"
    notes = f"{project}/merge_requests/{_variable('CI_MERGE_REQUEST_IID')}/notes"
    return Thread(notes, notes, "PUT", {"PRIVATE-TOKEN": _variable("MEMPLAN_TOKEN")})


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise UsageError(f"--post: the variable {name} is not set", "docs/ci.md says what sets it")
    return value


def _existing(thread: Thread, marker: str) -> int | None:
    for page in range(1, _MOST_PAGES + 1):
        found = _ask(thread, "GET", f"{thread.all}?per_page={_PAGE}&page={page}")
        for comment in found:
            if (comment["body"] or "").startswith(marker):
                return int(comment["id"])
        if len(found) < _PAGE:
            break
    return None


def _ask(thread: Thread, method: str, address: str, content: dict[str, str] | None = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    headers = {**thread.headers, "Content-Type": "application/json"}
    request = urllib.request.Request(address, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        return json.loads(answer.read() or b"null")
