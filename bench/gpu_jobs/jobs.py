"""The command lines of the GPU jobs, the most telling first: the budget may not last for all."""

from __future__ import annotations

JOBS: dict[str, str] = {
    "gpt2-fp32-adamw": "--model gpt2 --batch 8 --length 512 --optimizer adamw --dropout 0.1",
    "gpt2-amp16-scaler-clip": (
        "--model gpt2 --batch 8 --length 1024 --precision amp-fp16 --optimizer adamw --clip 1.0"
    ),
    "llama1b-bf16-fused": (
        "--model llama --batch 4 --length 1024 --precision bf16 --optimizer adamw-fused"
    ),
    "resnet50-fp32-sgd": "--model resnet50 --batch 64 --length 224 --optimizer sgd",
    "bert-amp16-mask": (
        "--model bert --batch 32 --length 256 --precision amp-fp16 --optimizer adamw"
        " --dropout 0.1 --mask"
    ),
    "vit-ampbf16-fused": (
        "--model vit --batch 64 --length 224 --precision amp-bf16 --optimizer adamw-fused"
    ),
    "convnext-ampbf16-adamw": (
        "--model convnext --batch 64 --length 224 --precision amp-bf16 --optimizer adamw"
    ),
    "unet-fp32-adam": "--model unet --batch 8 --length 256 --optimizer adam",
    "llama1b-bf16-checkpoint": (
        "--model llama --batch 8 --length 1024 --precision bf16 --optimizer adamw --checkpoint"
    ),
    "gpt2-ampbf16-accumulate": (
        "--model gpt2 --batch 4 --length 1024 --precision amp-bf16 --optimizer adamw-fused"
        " --accumulate 4 --dropout 0.1"
    ),
    "decoder-bf16-flash": (
        "--model decoder --batch 8 --length 1024 --precision bf16 --sdpa flash --dropout 0.1"
    ),
    "decoder-fp32-efficient-mask": (
        "--model decoder --batch 4 --length 1000 --sdpa efficient --mask --optimizer sgd"
    ),
    "decoder-bf16-cudnn": "--model decoder --batch 8 --length 1024 --precision bf16 --sdpa cudnn",
    "decoder-fp32-math-mask": (
        "--model decoder --batch 4 --length 512 --sdpa math --mask --dropout 0.1 --optimizer sgd"
    ),
    "decoder-ampbf16-default": (
        "--model decoder --batch 8 --length 1024 --precision amp-bf16 --optimizer adamw --clip 1.0"
    ),
    "resnet50-amp16-channels-last": (
        "--model resnet50 --batch 128 --length 224 --precision amp-fp16 --optimizer sgd"
        " --channels-last"
    ),
    "unet-amp16-scaler": (
        "--model unet --batch 16 --length 256 --precision amp-fp16 --optimizer adamw"
    ),
    "decoder-amp16-checkpoint": (
        "--model decoder --batch 8 --length 1024 --precision amp-fp16 --checkpoint --accumulate 2"
    ),
    "convnext-fp32-sgd": "--model convnext --batch 32 --length 224 --optimizer sgd",
    "lstm-fp32-adam": "--model lstm --batch 64 --length 128 --optimizer adam --dropout 0.2",
    "llama1b-bf16-frozen": (
        "--model llama --batch 4 --length 1024 --precision bf16 --optimizer adamw --freeze"
    ),
    "gpt2-ampbf16-aot-eager": (
        "--model gpt2 --batch 8 --length 512 --precision amp-bf16 --compile aot_eager"
    ),
    "gpt2-ampbf16-inductor": (
        "--model gpt2 --batch 8 --length 512 --precision amp-bf16 --dropout 0.1 --compile inductor"
    ),
    "decoder-bf16-inductor": (
        "--model decoder --batch 8 --length 1024 --precision bf16 --compile inductor"
    ),
    "decoder-bf16-reduce-overhead": (
        "--model decoder --batch 8 --length 1024 --precision bf16 --compile reduce-overhead"
    ),
    "resnet50-ampbf16-inductor": (
        "--model resnet50 --batch 64 --length 224 --precision amp-bf16 --optimizer sgd"
        " --compile inductor"
    ),
}
