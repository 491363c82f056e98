"""`auto_checkpoint`, `memplan.compile` and `backend="memplan"` on the CPU: the numbers of plain
steps, and what is promised of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memplan
from bench.recompute.tracker import measure
from memplan.runtime.graph.extra_guards import missing_guards
from memplan.runtime.graph.inductor import unavailable

ROWS, WIDTH, STEPS = 512, 64, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)]
    return nn.Sequential(*block, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())


def loss_of_net(net: nn.Sequential) -> Callable[[Tensor], Any]:
    return lambda batch: net(batch).square().mean()


def train(
    net: nn.Sequential, *, compiled: bool = False, run: Callable[[Tensor], Any] | None = None
) -> list[Tensor]:
    """The losses, and the weights at the end. `run` gives a batch's loss."""
    optimizer = torch.optim.AdamW(net.parameters())
    loss_of: Callable[[Tensor], Tensor] = run or loss_of_net(net)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled_step = memplan.compile(loss_of, optimizer=optimizer)
    once: Any = compiled_step if compiled else step
    torch.manual_seed(1)
    losses = [once(torch.randn(ROWS, WIDTH)).clone() for _ in range(STEPS)]
    report = compiled_step.report()
    if compiled and bool(report.programs) == bool(missing_guards()):
        raise SystemExit(f"memplan: memplan.compile: {report}")
    return [*losses, *net.parameters()]


def in_regions(codegen: str, budget: int | str | None) -> tuple[list[Tensor], int]:
    """What training with `torch.compile(backend="memplan")` leaves, and the peak of a region."""
    torch._dynamo.reset()
    net, batch = model(), torch.randn(ROWS, WIDTH)
    options: Any = {"codegen": codegen, "budget": budget, "deadline_seconds": 1.0}
    run = torch.compile(loss_of_net(net), backend="memplan", dynamic=False, options=options)
    trained = train(net, run=run)

    def pass_both_ways() -> None:
        run(batch).backward()

    return trained, measure(pass_both_ways, [batch, *net.parameters()]).peak_bytes


def main() -> None:
    plain, checkpointed = train(model()), model()
    applied = memplan.auto_checkpoint(
        checkpointed, torch.randn(ROWS, WIDTH), output_held=False, cost="flops"
    )
    assert applied.peak_bytes < applied.plain_peak_bytes, applied
    for name, other in (
        ("auto_checkpoint", train(checkpointed)),
        ("memplan.compile", train(model(), compiled=True)),
    ):
        same = all(map(torch.equal, plain, other))
        print(name, "same numbers" if same else "other bits")
    for codegen in ("eager", "inductor"):
        if codegen == "inductor" and (why := unavailable([torch.device("cpu")])):
            print(f"memplan: not run with codegen={codegen!r}: {why}, same numbers")
            continue
        wanted, most = in_regions(codegen, None)
        _, low = in_regions(codegen, "least")
        budget = (low + most) // 2
        found, peak = in_regions(codegen, budget)
        if codegen == "eager":
            same = all(map(torch.equal, [*plain, *plain], [*wanted, *found]))
        else:
            same = all(map(torch.allclose, wanted, found))
        within = max(low, peak) <= budget < most
        print(f"{codegen}: {most} bytes, least {low}, {peak} within {budget}:", end=" ")
        print("same numbers" if same and within else "other numbers or above the budget")


if __name__ == "__main__":
    main()
