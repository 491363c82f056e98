"""Twelve models of Transformers and torchvision: compiled training gives the bits of the plain one.

    python -m bench.compiled_models [NAME…]

Each is small (two layers of width 64, pictures of 64 × 64; torchvision's networks are whole) and is
trained for four steps with AdamW on random batches, on the CPU: plainly; by `memplan.compile`; and
as `torch.compile(model, backend="memplan")` with PyTorch's own kernels, without a budget and to the
least peak. Losses, weights, buffers, optimizer state and the generator's state are compared bit by
bit with the plain ones; the peak of the fourth step is that of the CPU allocator's record. Rows of
`bench/results/compiled_models.json` are replaced one by one.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan
from bench.recompute.tracker import measure
from bench.results import known_result, write_result
from memplan.capturing.standins.adapters import make_torchvision_importable

SEED = 1729
STEPS = 4
DEADLINE_SECONDS = 0.5
WORDS = 100
PLAIN, STEP = "plain", "step"
REGIONS: dict[str, dict[str, Any]] = {"backend": {}, "least": {"budget": "least"}}
WAYS = (PLAIN, STEP, *REGIONS)

_ENCODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_DECODER = {**_ENCODER, "num_key_value_heads": 2}

Batch = tuple[Tensor, ...]


class Job(NamedTuple):
    model: nn.Module
    loss: Callable[..., Tensor]
    """Of the model, which may be compiled, and a batch."""
    batch: Callable[[], Batch]


def _text(family: str, model: str, **config: Any) -> Job:
    import transformers

    tokenizer = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    made = getattr(transformers, f"{family}Config")(vocab_size=WORDS, **tokenizer, **config)

    def loss(run: Any, given: Tensor) -> Tensor:
        found: Tensor = run(input_ids=given, labels=given).loss
        return found

    built = getattr(transformers, f"{family}{model}")(made)
    return Job(built, loss, lambda: (torch.randint(WORDS, (2, 16)),))


def _whisper() -> Job:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16,
        max_source_positions=50, max_target_positions=32, vocab_size=WORDS,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip

    def loss(run: Any, sound: Tensor, words: Tensor) -> Tensor:
        found: Tensor = run(input_features=sound, labels=words).loss
        return found

    def batch() -> Batch:
        return torch.randn(2, config.num_mel_bins, 100), torch.randint(WORDS, (2, 16))

    return Job(WhisperForConditionalGeneration(config), loss, batch)


def _pictures(model: nn.Module, logits: Callable[[Any], Tensor]) -> Job:
    def loss(run: Any, pictures: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits(run(pictures)), labels)

    return Job(model, loss, lambda: (torch.randn(2, 3, 64, 64), torch.randint(10, (2,))))


def _vit() -> Job:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_ENCODER, image_size=64, num_labels=10)
    return _pictures(ViTForImageClassification(config), lambda found: found.logits)


def _torchvision(name: str) -> Job:
    make_torchvision_importable()
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=10)
    return _pictures(model, lambda found: found)


def _deeplab() -> Job:
    make_torchvision_importable()
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(num_classes=10, weights_backbone=None)
    return _pictures(model, lambda found: found["out"].mean((2, 3)))


JOBS: dict[str, Callable[[], Job]] = {
    "gpt2": lambda: _text("GPT2", "LMHeadModel", n_embd=64, n_layer=2, n_head=4),
    "bert": lambda: _text("Bert", "ForMaskedLM", **_ENCODER),
    "t5": lambda: _text(
        "T5", "ForConditionalGeneration", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    ),
    "llama": lambda: _text("Llama", "ForCausalLM", **_DECODER),
    "mistral": lambda: _text("Mistral", "ForCausalLM", **_DECODER),
    "qwen2": lambda: _text("Qwen2", "ForCausalLM", **_DECODER),
    "vit": _vit,
    "whisper": _whisper,
    "resnet50": lambda: _torchvision("resnet50"),
    "mobilenet_v2": lambda: _torchvision("mobilenet_v2"),
    "efficientnet_b0": lambda: _torchvision("efficientnet_b0"),
    "deeplab_v3": _deeplab,
}  # fmt: skip


class Said(logging.Handler):
    """What memplan warns of: that something runs plainly, or in its own order, and why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def trained(name: str, way: str) -> tuple[list[Tensor], dict[str, Any]]:
    """What all steps leave behind, and what is told of them."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    model, loss, batch = JOBS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    *batches, last = [batch() for _ in range(STEPS)]
    run: Any = model
    if way in REGIONS:
        options = {"codegen": "eager", "deadline_seconds": DEADLINE_SECONDS, **REGIONS[way]}
        run = torch.compile(model, backend="memplan", dynamic=False, options=options)

    def loss_fn(*given: Tensor) -> Tensor:
        return loss(run, *given)

    def plain(*given: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss_fn(*given)
        found.backward()
        optimizer.step()
        return found.detach()

    said = Said()
    logging.getLogger("memplan").addHandler(said)
    step: Any = plain
    if way == STEP:
        step = memplan.compile(loss_fn, optimizer=optimizer, deadline_seconds=DEADLINE_SECONDS)
    losses = [float(step(*given)) for given in batches]
    optimizer.zero_grad()
    state = [one for of in optimizer.state.values() for one in of.values()]
    kept = [*model.parameters(), *model.buffers(), *state]
    peak = measure(lambda: losses.append(float(step(*last))), [*kept, *last])
    told: dict[str, Any] = {"peak_bytes": peak.peak_bytes}
    logging.getLogger("memplan").removeHandler(said)
    if way == STEP:
        (program,) = step.report().programs
        told["promised_bytes"] = program.ordered_peak_bytes
    found = [torch.tensor(losses, dtype=torch.float64), *(one.detach() for one in kept)]
    return [*found, torch.get_rng_state()], {**told, "warnings": said.words}


def run(name: str) -> dict[str, Any]:
    plain, told = trained(name, PLAIN)
    found = {PLAIN: told}
    for way in WAYS[1:]:
        bits, found[way] = trained(name, way)
        same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, bits, strict=True)]
        found[way]["other"] = same.count(False)
    peaks = ", ".join(f"{way} {found[way]['peak_bytes'] / 2**20:.1f}" for way in WAYS)
    other = sum(found[way]["other"] for way in WAYS[1:])
    print(f"{name:16s} {'OTHER BITS' if other else 'same bits'}, peaks {peaks} MiB", flush=True)
    for way in WAYS:
        for words in found[way]["warnings"]:
            print(f"  {way}: {words}", flush=True)
    return found


def summarize(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask."""
    every = models.values()
    runs = [found[way] for found in every for way in WAYS[1:]]
    return {
        "models": len(models),
        "runs": len(runs),
        "identical": sum(not one["other"] for one in runs),
        "plain": sum(bool(one["warnings"]) for one in runs),
        "not_above_plain": {
            way: sum(found[way]["peak_bytes"] <= found[PLAIN]["peak_bytes"] for found in every)
            for way in WAYS[1:]
        },
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(JOBS))
    options = parser.parse_args(arguments)
    for name in options.names:
        found = run(name)
        models = {**known_result("compiled_models").get("models", {}), name: found}
        write_result("compiled_models", {"summary": summarize(models), "models": models})
    return 0


if __name__ == "__main__":
    sys.exit(main())
