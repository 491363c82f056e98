"""Scripts of a few lines, and their captures."""

from __future__ import annotations

from pathlib import Path

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile
from memplan.types.trace import Trace

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(4096, 512)), batch_size=4)

def forward(batch):
    return model(batch.cuda()).square().mean()
"""

EPOCHS = """
for epoch in range(10):
    for (batch,) in loader:
        forward(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for (batch,) in DataLoader(TensorDataset(torch.randn(4096, 512)), batch_size=1024):
            forward(batch)
"""


def run(tmp_path: Path, body: str, *, steps: int | None = None, head: str = HEAD) -> Trace:
    script = tmp_path / "train.py"
    (tmp_path / "helper.py").write_text("x = 1\n  y = 2\n")
    script.write_text(head + body)
    options = CaptureOptions(profile=find_profile("rtx4090"), steps=steps)
    return capture_script(ScriptTarget("script", str(script)), options)


def indented(batch: str, width: int) -> str:
    lines = [f"forward({batch}).backward()", "optimizer.step()", "optimizer.zero_grad()"]
    return "".join(" " * width + line + "\n" for line in lines)
