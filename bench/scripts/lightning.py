"""Lightning's demonstration classes, `lightning.pytorch.demos`, by its own command line."""

from __future__ import annotations

from bench.scripts.case import Case, Reference
from bench.scripts.litgpt import SETUP

_LAYERS = 2 * 242_000 + 2 * 403_200 + 2 * 400
_PARAMETERS = 33_278 * (200 + 200 + 1) + _LAYERS
"""Of its `LightningTransformer`: embedding, `torch.nn.Transformer` of 2 + 2 layers, decoder."""
_DEMO = "bench.scripts.lightning_demo"


def _case(
    name: str,
    *arguments: str,
    launcher: tuple[str, ...] = (),
    ranks: int = 1,
    exit_codes: tuple[int, ...] = (0, 3),
    message: str = "",
    found: tuple[str, str] = ("nothing", ""),
) -> Case:
    words = " ".join((*launcher, "… fit", *(a.removeprefix("--trainer.") for a in arguments)))
    return Case(
        name=f"lightning-{name}",
        setup=SETUP,
        package="lightning==2.6.6",
        argv=(
            *launcher, "-m", _DEMO, "fit",
            "--model", "lightning.pytorch.demos.transformer.LightningTransformer",
            "--trainer.accelerator", "gpu", "--trainer.max_epochs", "1", *arguments,
        ),
        prepare=(("-m", "bench.scripts.local", "words", "{work}/data"),),
        exit_codes=exit_codes,
        message=message,
        floor=Reference(8 * _PARAMETERS // ranks, "14.6 M × 8 bytes (SGD)"),
        script=f"`demos.transformer.LightningTransformer` by `LightningCLI`: `{words}`",
        broke=found[0],
        mended=found[1],
    )  # fmt: skip


_TORCHRUN = ("torchrun", "--nproc-per-node", "2")
_TWO = ("--trainer.precision", "bf16-mixed", "--trainer.devices", "2")

CASES = (
    _case("transformer", "--trainer.precision", "bf16-mixed", "--trainer.devices", "1"),
    _case(
        "ddp", *_TWO, "--trainer.strategy", "ddp", launcher=_TORCHRUN,
        found=("`monitored_barrier` asked of a group itself", "it is answered as the function is"),
    ),
    _case(
        "fsdp", *_TWO, "--trainer.strategy", "fsdp", launcher=_TORCHRUN, ranks=2,
        found=("the same", "the same"),
    ),
    _case(
        "unlaunched", *_TWO, "--trainer.strategy", "ddp",
        exit_codes=(4,), message="--world-size N",
        found=(
            "one process without a launcher has one GPU here, and the answer was to leave the "
            "Trainer out",
            "it is refused, and told `--world-size N`",
        ),
    ),
)  # fmt: skip
