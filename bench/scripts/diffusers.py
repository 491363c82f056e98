"""Training scripts of diffusers, on Stable Diffusion 1.5."""

from __future__ import annotations

from pathlib import Path

from bench.scripts.accelerate import SETUP as HUGGING_FACE
from bench.scripts.case import Answer, Case, Check, Reference, Setup, pinned
from bench.scripts.checks import share, share_at_least

SETUP = Setup(
    "diffusers",
    wheels=(
        *HUGGING_FACE.wheels,
        *pinned("diffusers grpcio markdown tensorboard-data-server tensorboard werkzeug"),
    ),
)
_MAKE = ("-m", "bench.scripts.make_diffusion")
_UNET = 859_520_964
_TEXT = 123_060_480
_VAE = 83_653_863
_FROZEN = 2 * (_TEXT + _VAE)
"""In fp16."""
_LORA = 797_184
"""Of rank 4 on the attention's four projections."""


def _case(
    name: str,
    script: str,
    arguments: str,
    *checks: Check,
    floor: Reference | None = None,
    data: str,
    precision: str = "fp16",
    model: str = "--pretrained_model_name_or_path={work}/sd",
    gpu: str = "rtx4090",
    exit_codes: tuple[int, ...] = (0, 3),
    message: str = "",
    found: tuple[str, str] = ("nothing", ""),
) -> Case:
    return Case(
        name=f"diffusers-{name}",
        setup=SETUP,
        package="huggingface/diffusers",
        argv=(
            "--gpus-per-node", "1", "accelerate", "launch", f"--mixed_precision={precision}",
            f"{{third_party}}/diffusers-examples/{script}",
            *model.split(), data, *arguments.split(),
        ),
        prepare=((*_MAKE, "model", "{work}/sd"), (*_MAKE, "pictures", "{work}/pictures")),
        checks=checks,
        floor=floor,
        gpu=gpu,
        exit_codes=exit_codes,
        message=message,
        broke=found[0],
        mended=found[1],
        script=f"`accelerate launch {script} … {arguments}`",
    )  # fmt: skip


_TRAIN = "--train_data_dir={work}/pictures"
_CONTROLNET = 361_279_120
_UNCONDITIONAL = 113_673_219
_LORA_README = (
    "--resolution=512 --random_flip --train_batch_size=1 --num_train_epochs=100 "
    "--checkpointing_steps=5000 --learning_rate=1e-04 --lr_scheduler=constant "
    "--lr_warmup_steps=0 --seed=42 --output_dir=out"
)


def _is_within_the_card(answer: Answer, _work: Path) -> list[str]:
    """The scripts' pages say that such a run does with a card of 24 GB."""
    peak, card = answer["peak_bytes"], answer["gpu"]["total_bytes"]
    return [] if peak <= card else [f"peak {peak:,} bytes of {card:,}"]


CASES = (
    _case(
        "text-to-image", "text_to_image/train_text_to_image.py",
        "--use_ema --resolution=512 --center_crop --random_flip --train_batch_size=1 "
        "--gradient_accumulation_steps=4 --gradient_checkpointing --max_train_steps=15000 "
        "--learning_rate=1e-05 --max_grad_norm=1 --lr_scheduler=constant --lr_warmup_steps=0 "
        "--output_dir=out",
        share("optimizer_state", 8 * _UNET),
        share_at_least("parameters", 4 * _UNET + _FROZEN),
        _is_within_the_card,
        floor=Reference(20 * _UNET + _FROZEN, "859.5 M × 20 (an average besides) + 206.7 M × 2 "
                        "bytes"),
        data=_TRAIN,
    ),
    _case(
        "text-to-image-lora-readme", "text_to_image/train_text_to_image_lora.py", _LORA_README,
        data=_TRAIN,
        exit_codes=(4,),
        message="Attempting to unscale FP16 gradients",
        found=(
            "the README tells the precision to the launcher alone, and the script then keeps its "
            "adapters in fp16: a run on a GPU ends with the same error",
            "it is passed on with the line that raised it",
        ),
    ),
    _case(
        "text-to-image-lora", "text_to_image/train_text_to_image_lora.py",
        f"{_LORA_README} --mixed_precision=fp16",
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
    _case(
        "controlnet", "controlnet/train_controlnet.py",
        "--resolution=512 --learning_rate=1e-5 --train_batch_size=1 "
        "--gradient_accumulation_steps=4 --output_dir=out",
        share("parameters", 4 * (_CONTROLNET + _UNET + _TEXT + _VAE)),
        share("optimizer_state", 8 * _CONTROLNET),
        floor=Reference(
            16 * _CONTROLNET + 4 * (_UNET + _TEXT + _VAE), "361.3 M × 16 + 1,066.2 M × 4 bytes"
        ),
        data="--train_data_dir={work}/pictures/controlled",
        precision="no",
    ),
    _case(
        "unconditional", "unconditional_image_generation/train_unconditional.py",
        "--resolution=64 --center_crop --random_flip --output_dir=out --train_batch_size=16 "
        "--num_epochs=100 --gradient_accumulation_steps=1 --use_ema --learning_rate=1e-4 "
        "--lr_warmup_steps=500 --mixed_precision=no",
        share_at_least("parameters", 4 * _UNCONDITIONAL),
        share("optimizer_state", 8 * _UNCONDITIONAL),
        floor=Reference(
            20 * _UNCONDITIONAL, "113.7 M × 20 bytes, the averaged weights included"
        ),
        data=_TRAIN,
        model="",
        precision="no",
    ),
)  # fmt: skip
