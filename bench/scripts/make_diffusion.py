"""Stable Diffusion 1.5 as a hub would deliver it, and pictures with captions, made here.

    python -m bench.scripts.make_diffusion model OUT | pictures OUT

The weights files have their real sizes and no contents.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.scripts.make import hollow_safetensors

_UNET: dict[str, Any] = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
_VAE: dict[str, Any] = {
    "sample_size": 512,
    "latent_channels": 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
_PICTURES = 64


def model(folder: Path) -> None:
    """The folders of a pipeline: networks, scheduler and tokenizer."""
    from memplan.capturing.standins.adapters import make_torchvision_importable

    make_torchvision_importable()
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    text = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    with torch.device("meta"):
        networks = {
            "unet": UNet2DConditionModel(**_UNET),
            "vae": AutoencoderKL(**_VAE),
            "text_encoder": CLIPTextModel(text),
        }
    for name, network in networks.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        if name == "text_encoder":
            network.config.architectures = ["CLIPTextModel"]
            network.config.save_pretrained(place)
            file = "model.safetensors"
        else:
            network.save_config(place)
            file = "diffusion_pytorch_model.safetensors"
        hollow_safetensors(place / file, network.state_dict())
    schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    schedule.save_config(folder / "scheduler")
    tokenizer(folder / "tokenizer")
    parts = {
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
    }
    index = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.30.0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def tokenizer(folder: Path) -> None:
    """CLIP's tokenizer, of single letters."""
    folder.mkdir(exist_ok=True)
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(letter + "</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    settings = {
        "model_max_length": 77,
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def pictures(folder: Path) -> None:
    """Pictures with their captions, as `datasets` reads a folder of images."""
    from PIL import Image

    lines = []
    for number in range(_PICTURES):
        Image.new("RGB", (512, 512), (number, 100, 50)).save(folder / f"{number}.png")
        row = {"file_name": f"{number}.png", "text": f"a shade of green, the {number}th"}
        lines.append(json.dumps(row))
    alone = folder / "instances"  # DreamBooth opens every file of its folder
    alone.mkdir(exist_ok=True)
    for number in range(5):
        Image.new("RGB", (512, 512), (number, 100, 50)).save(alone / f"{number}.png")
    controlled = folder / "controlled"
    controlled.mkdir(exist_ok=True)
    pairs = []
    for number in range(16):
        names = {
            "image_file_name": f"{number}.png",
            "conditioning_image_file_name": f"c{number}.png",
        }
        for name in names.values():
            Image.new("RGB", (512, 512), (number, 100, 50)).save(controlled / name)
        pairs.append(json.dumps({**names, "text": f"the {number}th"}))
    (controlled / "metadata.jsonl").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    {"model": model, "pictures": pictures}[kind](folder)


if __name__ == "__main__":
    main()
