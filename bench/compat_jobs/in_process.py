"""`auto_checkpoint` and `memplan.compile` on the CPU: the bits of plain steps, and less memory."""

from __future__ import annotations

import torch
from torch import nn

import memplan

ROWS, WIDTH, STEPS = 64, 128, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)]
    return nn.Sequential(*block, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())


def train(net: nn.Sequential, *, compiled: bool = False) -> list[torch.Tensor]:
    """The losses, and the weights at the end."""
    optimizer = torch.optim.AdamW(net.parameters())

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(batch).square().mean()
        return loss

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled_step = memplan.compile(loss_of, optimizer=optimizer)
    run = compiled_step if compiled else step
    torch.manual_seed(1)
    losses = [run(torch.randn(ROWS, WIDTH)).clone() for _ in range(STEPS)]
    if compiled:
        assert compiled_step.report().programs, compiled_step.report()
    return [*losses, *net.parameters()]


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
        print(name, "same bits" if same else "other bits")


if __name__ == "__main__":
    main()
