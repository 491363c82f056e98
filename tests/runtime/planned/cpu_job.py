"""Real trainings on the CPU, in a process of its own: `python cpu_job.py JOB.json OUT.json`.

A run under the planned allocator gets the memory of its tensors from the library, over the stand-in
driver that `MEMPLAN_CUDA_DRIVER` names. Out comes of each run every loss and a digest of all
parameters and gradients, bit for bit, and what the allocator did.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memplan.cli.run_watch import Watch, memory_of
from memplan.layout.static_plan import plan_of, static_plan
from memplan.runtime.planned.install import follow
from memplan.runtime.planned.job import Job as FollowedJob
from memplan.runtime.planned.library import Library
from memplan.runtime.planned.recording import observed_meta
from memplan.types.plan_file import load_plan, save_plan
from tests.runtime.planned.fake_library import wait_for_plan
from tests.terminal import Terminal, plain

DEVICE = 0


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to train, and on what."""

    model: str = "transformer"
    steps: int = 6
    micro_batches: int = 1
    evaluate_every: int = 0
    """Steps after which an evaluation follows; 0: never."""
    log_every: int = 0
    """Steps after which norms and a history of losses are kept."""
    short_every: int = 0
    """Steps of which the last one has a smaller batch."""
    planned: bool = False
    """Under the planned allocator; once a run was, those after it must be too."""
    plan: str = ""
    """In effect from the beginning; empty: the job is recorded and planned on the way."""
    save_plan: str = ""
    """Write the plan of what was recorded to this file."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs, one after the other."""

    library: str
    adaptor: str
    runs: list[Run]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5, dim=-1)
        out: Tensor = self.out(F.dropout(weights, 0.1, self.training) @ v)
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Experts(nn.Module):
    """A mixture of experts that routes by its values: sizes differ in every step."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = torch.softmax(self.router(rows), dim=-1).max(dim=-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == number).squeeze(1)
            out = out.index_add(0, mine, expert(rows[mine]) * share[mine, None])
        return x + out.view_as(x)


class Transformer(nn.Module):
    def __init__(self, vocab: int = 256, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Routed(Transformer):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = Experts(96)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
            )
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for layer in self.layers:
            x = layer(x)
        labels = (images.mean(dim=(1, 2, 3)) > 0).long()
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


MODELS = {"transformer": Transformer, "routed": Routed, "convolutions": Convolutions}


def batches(run: Run) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7)
    count = run.steps * run.micro_batches
    for number in range(count):
        short = run.short_every and (number + 1) % run.short_every == 0
        rows = 5 if short else 16
        if run.model == "convolutions":
            yield torch.randn(rows, 3, 48, 48, generator=generator)
        else:
            yield torch.randint(256, (rows, 64), generator=generator)


def train(run: Run, before_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    torch.manual_seed(3)
    model = MODELS[run.model]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    history: list[Tensor] = []
    step = 0
    for number, batch in enumerate(batches(run)):
        loss = model(batch) / run.micro_batches
        loss.backward()
        losses.append(loss.item())
        if (number + 1) % run.micro_batches:
            continue
        step += 1
        if run.log_every and step % run.log_every == 0:
            history.append(loss.detach())
            norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
            losses.append(norms.sum().item())
            losses.append(torch.stack(history).mean().item())
        before_step()
        optimizer.step()
        if step < run.steps:
            optimizer.zero_grad(set_to_none=True)
        if run.evaluate_every and step % run.evaluate_every == 0:
            losses.append(evaluate(model, batch))
    tensors = [p for parameter in model.parameters() for p in (parameter, parameter.grad)]
    digest = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        digest.update(tensor.detach().numpy().tobytes())
    return {"losses": [float(loss).hex() for loss in losses], "digest": digest.hexdigest()}


def evaluate(model: nn.Module, batch: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        total = torch.stack([model(batch[:rows]) for rows in (3, 8)]).sum()
    model.train()
    return total.item()


def train_planned(run: Run, library: Library) -> dict[str, Any]:
    """On the planned allocator; the planner in the background is waited for, so that the switch
    comes in the same step each time."""
    plan = load_plan(run.plan).allocation if run.plan else None
    meta = observed_meta(["cpu_job.py"], torch.__version__, "", "")
    followed = FollowedJob(library, [DEVICE], meta, plan=plan)
    library.reset_peaks(DEVICE)
    with follow(followed) as running:
        before = library.statistics(DEVICE)
        shown, said = Terminal(), list[str]()
        with Watch(lambda: memory_of(running), shown.slave, said.append):
            found = train(run, lambda: wait_for_plan(followed))
            watched = memory_of(running)
        assert not said, said
        after = library.statistics(DEVICE)
        assert after is not None
        start = before.as_dict() if before is not None else {}
        counts = {name: value - start.get(name, 0) for name, value in after.as_dict().items()}
        found |= {"counts": counts, "outcome": running.stats()}
        found |= {
            "watched": asdict(watched),
            "shown": plain(shown.text),
            "counted": after.as_dict(),
        }
    library.unload(DEVICE)
    if run.save_plan:
        assert followed.recorded is not None
        made = static_plan(followed.recorded, seconds=2.0)
        save_plan(plan_of(followed.recorded, made), run.save_plan, overwrite=True)
    return found


def main(job_file: str, out: str) -> None:
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    library = Library(job.library)
    results = []
    for number, run in enumerate(job.runs):
        if run.planned and not any(before.planned for before in job.runs[:number]):
            failed = ctypes.CDLL(job.adaptor).cpu_adaptor_install(os.fsencode(job.library))
            assert not failed
        results.append(train_planned(run, library) if run.planned else train(run))
    Path(out).write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
