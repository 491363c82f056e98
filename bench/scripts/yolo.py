"""Ultralytics' `yolo` command, training YOLO11n from its configuration."""

from __future__ import annotations

from bench.scripts.case import Case, Setup, pinned
from bench.scripts.checks import peak_between

SETUP = Setup(
    "ultralytics",
    wheels=pinned(
        "certifi charset-normalizer contourpy cycler fonttools kiwisolver matplotlib "
        "nvidia-ml-py opencv-python-headless polars polars-runtime-32 pyparsing requests "
        "ultralytics ultralytics-platform ultralytics-thop urllib3"
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
