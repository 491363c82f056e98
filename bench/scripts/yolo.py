"""Ultralytics' `yolo` command, training YOLO11n from its configuration."""

from __future__ import annotations

from bench.scripts.case import Case, Setup
from bench.scripts.checks import peak_between

SETUP = Setup(
    "ultralytics",
    wheels=(
        "certifi==2026.10.18",
        "charset-normalizer==3.5.2",
        "contourpy==1.3.3",
        "cycler==0.12.1",
        "fonttools==4.68.0",
        "kiwisolver==1.5.1",
        "matplotlib==3.11.2",
        "nvidia-ml-py==13.615.71",
        "opencv-python-headless==5.0.0.93",
        "polars==2.1.0",
        "polars-runtime-32==2.1.0",
        "pyparsing==3.3.3",
        "requests==2.34.2",
        "ultralytics==8.4.190",
        "ultralytics-platform==0.1.99",
        "ultralytics-thop==2.2.3",
        "urllib3==2.8.0",
    ),
)

CASES = (
    Case(
        name="ultralytics-yolo",
        setup=SETUP,
        package="ultralytics==8.4.190",
        argv=(
            "{site}/bin/yolo", "detect", "train", "model=yolo11n.yaml",
            "data={work}/images/data.yaml", "epochs=3", "batch=16", "imgsz=640", "device=0",
            "workers=2",
        ),
        prepare=(("-m", "bench.scripts.local", "images", "{work}/images", "64"),),
        checks=(peak_between(2 << 30, 5 << 30),),
        script="`yolo detect train model=yolo11n.yaml batch=16 imgsz=640`",
        broke="nothing in training; its validation needs torchvision's `nms`, which a "
        "torchvision built for CUDA lacks beside a CPU build of PyTorch",
        mended="a rule says what `nms` takes and keeps",
    ),
)  # fmt: skip
