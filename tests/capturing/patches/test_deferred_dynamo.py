"""Dynamo is imported for the jobs that need it, and for no other; it is then as it always is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TRAINING = """
import torch
from torch.utils.checkpoint import checkpoint

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = checkpoint(model, torch.randn(16, 64).cuda(), use_reentrant=False).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

DRIVER = """
import json, sys
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile
from memplan.types.trace import EventKind

def requests(trace):
    # When garbage is collected, and with it what it holds, differs from run to run.
    return trace.events.bytes[trace.events.kind == EventKind.ALLOC].tolist()

def loaded():
    return "torch._dynamo.eval_frame" in sys.modules

seen = {}
options = CaptureOptions(profile=find_profile("24GiB"))
plain = capture_script(ScriptTarget("script", sys.argv[1], []), options)
seen["plain"] = loaded()

import torch
from torch._dynamo import config

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
seen["optimizer"] = loaded()
asking = capture_script(ScriptTarget("script", sys.argv[2], []), options)
seen["asked"] = loaded()
seen["cuda"] = torch.cuda.is_available()
seen["same"] = requests(plain) == requests(asking)
seen["config"] = torch._dynamo.config is config
seen["utils"] = torch._dynamo.utils is sys.modules["torch._dynamo.utils"]

graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

@torch.compile(backend=backend)
def step(x):
    y = x * 2
    optimizer.zero_grad()
    return y + 1

seen["result"] = step(torch.ones(2)).tolist()
seen["graphs"] = len(graphs)
print(json.dumps(seen))
"""


def test_dynamo_is_imported_when_something_is_asked_of_it(tmp_path: Path) -> None:
    plain, asking = tmp_path / "plain.py", tmp_path / "asking.py"
    plain.write_text(TRAINING)
    asking.write_text("from torch._dynamo.utils import is_compile_supported\n" + TRAINING)
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, str(plain), str(asking)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    assert not seen["plain"]
    assert not seen["optimizer"]
    assert seen["asked"]
    assert not seen["cuda"]
    assert seen["same"]
    assert seen["config"]
    assert seen["utils"]
    assert seen["result"] == [3.0, 3.0]
    assert seen["graphs"] == 2  # the optimizer's own function is left alone, and splits the step


def test_a_submodule_that_brings_the_package_in_runs_once() -> None:
    code = """
import torch
from memplan.capturing.patches.deferred_dynamo import dynamo

dynamo.start()
import torch._dynamo.utils
import torch._dynamo.output_graph

assert torch._dynamo.output_graph.counters is torch._dynamo.utils.counters
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
assert torch._dynamo.utils.__spec__.loader.get_source("torch._dynamo.utils")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WITH_TRITON = """
import sys
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile

options = CaptureOptions(profile=find_profile("24GiB"), packages=("triton",))
print(len(capture_script(ScriptTarget("script", sys.argv[1], []), options).events))
"""


def test_dynamo_is_imported_after_a_stand_in_for_triton(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import triton, torch\ntorch.use_deterministic_algorithms(True)\n" + TRAINING)
    command = [sys.executable, "-c", WITH_TRITON, str(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.splitlines()[-1]) > 0
