"""Lightning's command line with the model, data and trainer that its options name."""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI()
