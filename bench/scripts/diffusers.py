"""Training scripts of diffusers, on Stable Diffusion 1.5."""

from __future__ import annotations

from bench.scripts.accelerate import SETUP as HUGGING_FACE
from bench.scripts.case import Case, Check, Reference, Setup
from bench.scripts.checks import share, share_at_least

SETUP = Setup("diffusers", wheels=(*HUGGING_FACE.wheels, "diffusers==0.42.1"))
_MAKE = ("-m", "bench.scripts.make_diffusion")
_UNET = 859_520_964
_TEXT = 123_060_480
_VAE = 83_653_863
_FROZEN = 2 * (_TEXT + _VAE)
"""In fp16."""
_LORA = 797_184
"""Of rank 4 on the attention's four projections."""


def _case(
    name: str, script: str, arguments: str, *checks: Check, floor: Reference, data: str
) -> Case:
    return Case(
        name=f"diffusers-{name}",
        setup=SETUP,
        package="huggingface/diffusers",
        argv=(
            "--gpus-per-node", "1", "accelerate", "launch", "--mixed_precision=fp16",
            f"{{third_party}}/diffusers-examples/{script}",
            "--pretrained_model_name_or_path={work}/sd", data,
            *arguments.split(),
        ),
        prepare=((*_MAKE, "model", "{work}/sd"), (*_MAKE, "pictures", "{work}/pictures")),
        checks=checks,
        floor=floor,
        gpu="rtx4090",
        script=f"`accelerate launch {script} … {arguments}`",
    )  # fmt: skip


_TRAIN = "--train_data_dir={work}/pictures"

CASES = (
    _case(
        "text-to-image", "text_to_image/train_text_to_image.py",
        "--use_ema --resolution=512 --center_crop --random_flip --train_batch_size=1 "
        "--gradient_accumulation_steps=4 --gradient_checkpointing --max_train_steps=15000 "
        "--learning_rate=1e-05 --max_grad_norm=1 --lr_scheduler=constant --lr_warmup_steps=0 "
        "--output_dir=out",
        share("optimizer_state", 8 * _UNET),
        share_at_least("parameters", 4 * _UNET + _FROZEN),
        floor=Reference(20 * _UNET + _FROZEN, "859.5 M × 20 (an average besides) + 206.7 M × 2 "
                        "bytes"),
        data=_TRAIN,
    ),
    _case(
        "text-to-image-lora", "text_to_image/train_text_to_image_lora.py",
        "--resolution=512 --random_flip --train_batch_size=1 --num_train_epochs=100 "
        "--checkpointing_steps=5000 --learning_rate=1e-04 --lr_scheduler=constant "
        "--lr_warmup_steps=0 --seed=42 --output_dir=out",
        share("optimizer_state", 8 * _LORA, tolerance=0.05),
        floor=Reference(2 * _UNET + _FROZEN + 16 * _LORA, "1,066.2 M × 2 + 0.8 M × 16 bytes"),
        data=_TRAIN,
    ),
    _case(
        "dreambooth", "dreambooth/train_dreambooth.py",
        "--instance_prompt=sks --resolution=512 --train_batch_size=1 "
        "--gradient_accumulation_steps=1 --learning_rate=5e-6 --lr_scheduler=constant "
        "--lr_warmup_steps=0 --max_train_steps=400 --output_dir=out",
        share("optimizer_state", 8 * _UNET),
        floor=Reference(16 * _UNET + _FROZEN, "859.5 M × 16 + 206.7 M × 2 bytes"),
        data="--instance_data_dir={work}/pictures/instances",
    ),
)  # fmt: skip
