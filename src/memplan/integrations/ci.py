"""`python -m memplan.integrations.ci --base REF --estimate "--gpu h100 train.py"`: what a change
does to a job's memory, as a comment on its pull or merge request.

The job is estimated as it is in the base, in a worktree of its own, and as it is here. The exit
code is that of the estimate here: 3 where the job does not fit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import memplan
from memplan.integrations.ci_comment import SERVICES, post
from memplan.report.text import headline
from memplan.types.errors import MemplanError, UsageError

_ANSWERED = (0, 3)
_LONGEST_ERROR = 2000


@dataclass(frozen=True)
class Estimated:
    """How `memplan estimate --json` ended on one of the two."""

    exit_code: int
    answer: Path
    """The file of the answer; empty without an answer."""
    error: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m memplan.integrations.ci", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--estimate", required=True, metavar="WORDS",
        help="what follows `memplan estimate`: '--gpu h100 train.py --batch-size 8'")  # fmt: skip
    add("--base", required=True, metavar="COMMIT", help="what the change is compared with")
    add("--share", action="append", default=[], metavar="PATH",
        help="what git does not hold and the base needs, too: data")  # fmt: skip
    add("-o", "--output", metavar="FILE", help="write the comment to this file")
    add("--post", choices=SERVICES, help="write it under the request that this runs for")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except MemplanError as error:
        print(f"memplan: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    words = shlex.split(args.estimate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with base_tree(args.base, folder / "base", args.share) as tree:
            before = estimated(words, tree, folder / "before.json")
        after = estimated(words, Path.cwd(), folder / "after.json")
        text = comment(args.estimate, before, after)
    for file in filter(None, (args.output, os.environ.get("GITHUB_STEP_SUMMARY"))):
        with Path(file).open("w" if file == args.output else "a", encoding="utf-8") as output:
            output.write(text)
    print(text)
    if args.post:
        post(args.post, text, marker(args.estimate))
    return after.exit_code


@contextmanager
def base_tree(commit: str, folder: Path, share: list[str]) -> Iterator[Path]:
    """This folder of the repository as it is in a commit, checked out in `folder`, with links to
    what is shared. Raises UsageError where git cannot."""
    if not commit:
        raise UsageError("--base is empty", "the commit that the change is compared with")
    if subprocess.run(("git", "cat-file", "-e", f"{commit}^{{commit}}"), check=False).returncode:
        shallow = _git("rev-parse", "--is-shallow-repository") == "true"  # else it became so
        _git("fetch", *(["--depth=1"] if shallow else []), "origin", commit)
        commit = "FETCH_HEAD"
    here = _git("rev-parse", "--show-prefix")
    _git("worktree", "add", "--detach", str(folder), commit)
    try:
        tree = folder / here
        for path in share:
            if Path(path).is_absolute() or not Path(path).exists():
                raise UsageError(f"--share {path}", "a path that is there, relative to this folder")
            if not (tree / path).exists():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).symlink_to(Path(path).absolute())
        if not tree.is_dir():
            raise UsageError(f"{commit} has no folder {here}", "run it from a folder that it has")
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> str:
    done = subprocess.run(("git", *words), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"git {words[0]}: {done.stderr.strip()}", "a checkout with this commit")
    return done.stdout.strip()


def estimated(words: list[str], tree: Path, file: Path) -> Estimated:
    """The estimate of the job as it is in a tree, whose packages are found before installed ones:
    those may be of the other tree."""
    own = [str(path) for path in (tree, tree / "src") if path.is_dir()]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = (sys.executable, "-P", "-m", "memplan", "estimate", "--json", *words)
    done = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False
    )
    if done.returncode in _ANSWERED:
        file.write_bytes(done.stdout)
        return Estimated(done.returncode, file, "")
    error = done.stderr.decode(errors="replace")
    sys.stderr.write(error)
    _, found, complaint = error.rpartition("memplan: error: ")
    return Estimated(done.returncode, file, (complaint if found else error)[-_LONGEST_ERROR:])


def marker(words: str) -> str:
    """What the comment about a job begins with, for it to be found again."""
    return f"<!-- memplan: {words.replace('--', '- -')} -->"


def comment(words: str, before: Estimated, after: Estimated) -> str:
    lines = [marker(words), ""]
    if not after.error:
        lines += [f"`{headline(memplan.read_estimate(str(after.answer)))}`", ""]
    if not (before.error or after.error):
        command = (sys.executable, "-P", "-m", "memplan", "diff", "--format", "markdown")
        files = (str(before.answer), str(after.answer))
        lines.append(subprocess.check_output((*command, *files), text=True))
    for name, side in (("the change", after), ("its base", before)):
        if side.error:
            fence = "~" * 12
            lines += [f"**memplan has no answer for {name}**", "", fence, side.error, fence, ""]
    return "\n".join([*lines, f"<sub><code>memplan estimate {_plain(words)}</code></sub>", ""])


def _plain(text: str) -> str:
    for sign in "&<>`|":
        text = text.replace(sign, f"&#{ord(sign)};")
    return text


if __name__ == "__main__":
    sys.exit(main())
