"""What a PyTorch process holds in RAM before it has any data of a job: the part of the host's
answer that a capture cannot see (docs/host.md).

Each stage runs in a process of its own, the later ones on top of the earlier. Resident bytes are
split as Linux splits them: anonymous memory is the process's own, pages of files (libraries) are
shared with every other process that maps the same files. Writes `bench/results/host_process.json`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from bench.results import ROOT, write_result

WORKERS = (1, 2, 4)
_STAGES = {
    "python": "",
    "torch": "import torch",
    "operators": """
import torch
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 8))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    net(torch.randn(4, 3, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    # A torchvision built for CUDA does not load beside a CPU build of torch, and need not.
    "transformers": """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name.split(".")[0] == "torchvision" else find_spec(name, *rest)
)
from transformers import LlamaForCausalLM, Trainer
""",
}
_WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    data = TensorDataset(torch.zeros(4096, 1024))
    loader = DataLoader(data, batch_size=8, num_workers={count}, multiprocessing_context={start!r})
    batches = iter(loader)
    for _ in range(64):
        next(batches)
    for worker in batches._workers:
        private = 0
        for line in open(f"/proc/{{worker.pid}}/smaps_rollup"):
            if line.startswith("Private_"):
                private += int(line.split()[1]) * 1024
        print("worker", private)
"""
_TELL = """
for line in open("/proc/self/status"):
    if line.startswith(("VmRSS", "RssAnon", "RssFile")):
        print(line.split()[0].rstrip(":"), int(line.split()[1]) * 1024)
"""


def run(code: str) -> list[list[str]]:
    """Words of each line that the code prints, in a process of its own. Raises RuntimeError."""
    path = ROOT / "build" / "host_process_stage.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(code, encoding="utf-8")
    done = subprocess.run((sys.executable, path), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return [line.split() for line in done.stdout.splitlines()]


def stage(code: str) -> dict[str, int]:
    """Resident bytes after some code: all, anonymous, of files."""
    names = {"VmRSS": "resident_bytes", "RssAnon": "anonymous_bytes", "RssFile": "file_bytes"}
    return {names[name]: int(nbytes) for name, nbytes in run(code + _TELL) if name in names}


def workers(count: int, start: str) -> int:
    """Bytes that the largest of some data loader workers shares with nobody."""
    lines = run(_WORKERS.format(count=count, start=start))
    return max(int(nbytes) for name, nbytes in lines if name == "worker")


def main() -> int:
    data: dict[str, Any] = {"stages": {}, "worker_private_bytes": {}}
    for name, code in _STAGES.items():
        data["stages"][name] = found = stage(code)
        print(f"{name:14s} {found['resident_bytes'] / 2**20:7.0f} MiB", flush=True)
    for start in ("fork", "spawn"):
        for count in WORKERS if start == "fork" else WORKERS[:1]:
            nbytes = workers(count, start)
            data["worker_private_bytes"][f"{start}_{count}"] = nbytes
            print(f"{start} of {count:2d}     {nbytes / 2**20:7.0f} MiB a worker", flush=True)
    print(write_result("host_process", data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
