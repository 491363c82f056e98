"""Commands in processes that start with PyTorch imported: forks of one that imports it once.

For tests of what a script or `memplan run` does, not of how it starts: whatever looks at tracebacks
or at what is imported when wants a Python of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_SERVER = """
import json, os, runpy, sys, types
import torch._dynamo  # which an optimizer would import
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
words, folder, environment, *files = json.loads(line)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
for number, path in enumerate((os.devnull, *files)):
    os.dup2(os.open(path, os.O_RDWR), number)
sys.stdin = open(0)
main = sys.modules["__main__"] = types.ModuleType("__main__")
sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
if words[0] == "-m":
    sys.path.insert(0, folder)
    sys.argv = words[1:]
    runpy._run_module_as_main(words[1])
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    sys.argv = words
    main.__file__ = words[0]
    with open(words[0]) as script:
        text = script.read()
    exec(compile(text, words[0], "exec"), vars(main))
"""


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with its stdin, so with this process."""
    command = [sys.executable, "-c", _SERVER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(
    folder: Path, *words: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in `folder`."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    environment = dict(os.environ if env is None else env)
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        asked = [words, str(folder), environment, out.name, err.name]
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        said = [Path(file.name).read_text() for file in (out, err)]
    return subprocess.CompletedProcess(words, code, *said)
