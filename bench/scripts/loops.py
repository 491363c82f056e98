"""Packages with a training loop, an optimizer or automatic differentiation of their own: programs
as in their documentation, and their own commands."""

from __future__ import annotations

from bench.scripts.case import Case, Reference, Setup, of_program
from bench.scripts.checks import share

_DATA = ("-m", "bench.scripts.datasets")
_MNIST = ((*_DATA, "mnist", "{work}/data"),)
_CLASSES = ((*_DATA, "classes", "{work}/images"),)
_SKLEARN = (
    "cloudpickle==3.1.2",
    "joblib==1.6.0",
    "narwhals==2.29.0",
    "scikit-learn==1.9.1",
    "threadpoolctl==3.8.0",
)
_REQUESTS = (
    "certifi==2026.10.18",
    "charset-normalizer==3.5.2",
    "requests==2.34.2",
    "urllib3==2.8.0",
)
_MATPLOTLIB = (
    "contourpy==1.3.3",
    "cycler==0.12.1",
    "fonttools==4.68.0",
    "kiwisolver==1.5.1",
    "matplotlib==3.11.2",
    "pyparsing==3.3.3",
)
_KERAS_RESNET50, _MOVING = 23_608_202, 53_120
"""For ten classes; of them the averages of the batch norms."""
_RESNET50 = 25_557_032
_MLP = (256 + 1) * 2048 + (2048 + 1) * 2048 + (2048 + 1) * 2
_AUTOENCODER = (784 + 1) * 400 + 2 * (400 + 1) * 50 + (50 + 1) * 400 + (400 + 1) * 784
_SHARED, _GATED = (54 + 128) * 256, 2 * 128 * 256 + 4 * 512
"""TabNet: layers that all six transformers share, and what each has of its own."""
_TABNET = 2 * 54 + _SHARED + 6 * _GATED + 5 * (64 * 54 + 2 * 54) + 64 * 7
_CONVOLUTIONS = 1280 + 147_584 + 295_168 + 590_080
_CRDNN = (
    _CONVOLUTIONS
    + 4 * 2 * 5120
    + (2560 + 512) * 512 + 2 * (256 * 512 + 2 * 512)
    + (512 + 1) * 256 + (256 + 1) * 256 + 2 * 2 * 256
    + (256 + 1) * 40
)  # fmt: skip
"""Convolutions and their norms, two recurrent layers whose directions share weights, the rest."""
_KERNEL = 4000 * 4000 * 4
_ENTITIES, _RELATIONS, _DIMENSION = 135, 46, 500
_ROTATE = 2 * _DIMENSION * (_ENTITIES + _RELATIONS)
_MACE = 848_528
"""In fp64, as its model has when it is built."""

CASES = (
    of_program(
        "keras==3.15.1", "keras_classifier",
        wheels=(
            "absl-py==2.5.1",
            "h5py==3.16.0",
            "keras==3.15.1",
            "ml-dtypes==0.6.0",
            "namex==0.1.0",
            "optree==0.20.0",
        ),
        environment={"KERAS_BACKEND": "torch"},
        checks=(share("parameters", 4 * (3 * _KERAS_RESNET50 - 2 * _MOVING)),),
        floor=Reference(
            16 * (_KERAS_RESNET50 - _MOVING), "23.6 M × 16 bytes; Keras' moments are parameters"
        ),
    ),
    of_program(
        "skorch==1.4.0", "estimator", wheels=(*_SKLEARN, "skorch==1.4.0", "tabulate==0.10.0"),
        checks=(share("parameters", 4 * _MLP),),
        floor=Reference(8 * _MLP, "4.7 M × 8 bytes (SGD)"),
    ),
    of_program(
        "pytorch-tabnet==4.1.0", "tabular", wheels=(*_SKLEARN, "pytorch-tabnet==4.1.0"),
        checks=(share("optimizer_state", 8 * _TABNET),),
        floor=Reference(16 * _TABNET, "0.47 M × 16 bytes"),
    ),
    of_program(
        "gpytorch==1.15.2", "gaussian_process",
        wheels=(*_SKLEARN, "gpytorch==1.15.2", "linear-operator==0.6.1"),
        floor=Reference(
            3 * _KERNEL, "three matrices of 4,000 × 4,000: the kernel, its derivative, its gradient"
        ),
    ),
    of_program(
        "pyro-ppl==1.9.2", "inference", "{work}/data", prepare=_MNIST,
        wheels=("opt-einsum==3.4.0", "pyro-api==0.1.2", "pyro-ppl==1.9.2"),
        checks=(
            share("parameters", 4 * _AUTOENCODER), share("optimizer_state", 8 * _AUTOENCODER)
        ),
        floor=Reference(16 * _AUTOENCODER, "0.69 M × 16 bytes"),
    ),
    of_program(
        "mmengine==0.10.7", "configured", "{work}/images", prepare=_CLASSES,
        wheels=(
            *_MATPLOTLIB,
            "addict==2.4.0",
            "mmengine==0.10.7",
            "opencv-python-headless==5.0.0.93",
            "platformdirs==4.14.7",
            "termcolor==3.3.0",
            "yapf==0.43.0",
        ),
        checks=(
            share("parameters", 4 * (_RESNET50 + _MOVING)),
            share("optimizer_state", 4 * _RESNET50),
        ),
        floor=Reference(12 * _RESNET50, "25.6 M × 12 bytes"),
    ),
    of_program(
        "speechbrain==1.1.2", "brain",
        wheels=(
            *_REQUESTS,
            "cffi==2.1.1",
            "hyperpyyaml==1.2.3",
            "joblib==1.6.0",
            "pycparser==3.12",
            "ruamel.yaml.clib==0.2.15",
            "ruamel.yaml==0.18.17",
            "sentencepiece==0.2.3",
            "soundfile==0.14.0",
            "speechbrain==1.1.2",
            "torchaudio==2.11.0",
        ),
        checks=(share("optimizer_state", 8 * _CRDNN),),
        floor=Reference(16 * _CRDNN, "3.1 M × 16 bytes"),
        found=(
            "a torchaudio built for CUDA cannot load its operators beside a CPU build of PyTorch, "
            "and did not import",
            "it is told that they are not there",
        ),
    ),
    Case(
        name="pykeen",
        setup=Setup(
            "pykeen",
            wheels=(
                *_REQUESTS,
                *_SKLEARN,
                "alembic==1.20.1",
                "backports.zstd==1.8.0",
                "class-resolver==0.8.2",
                "click-default-group==1.2.4",
                "colorlog==6.12.0",
                "dataclasses-json==0.6.7",
                "docdata==0.0.5",
                "mako==1.4.3",
                "marshmallow==3.26.2",
                "more-click==0.1.3",
                "more-itertools==11.2.1",
                "optuna==5.0.0",
                "pykeen==1.11.1",
                "pystow==0.10.3",
                "sqlalchemy==2.1.9",
                "tabulate==0.10.0",
                "torch-max-mem==0.1.6",
                "torch-ppr==0.0.8",
                "typing-inspect==0.9.0",
            ),
        ),
        package="pykeen==1.11.1",
        argv=(
            "-m", "pykeen", "train", "rotate", "--dataset", "umls", "--embedding-dim", "500",
            "--number-epochs", "1", "--batch-size", "512", "--device", "cuda",
            "--output-directory", "out",
        ),
        floor=Reference(
            16 * _ROTATE + 652 * _ENTITIES * _DIMENSION * 8,
            "0.18 M × 16 bytes + the distances of 652 × 135 triples in 500 complex dimensions",
        ),
        script="`pykeen train rotate --dataset umls --embedding-dim 500 --number-epochs 1 …`",
    ),
    Case(
        name="mace-torch",
        setup=Setup(
            "mace-torch",
            wheels=(
                *_MATPLOTLIB,
                "ase==3.29.0",
                "configargparse==1.9.0",
                "e3nn==0.4.4",
                "gitdb==4.0.12",
                "gitpython==3.2.1",
                "h5py==3.16.0",
                "lightning-utilities==0.15.3",
                "lmdb==3.0.0",
                "mace-torch==0.3.16",
                "matscipy==1.3.1",
                "opt-einsum-fx==0.1.4",
                "opt-einsum==3.4.0",
                "orjson==3.13.0",
                "prettytable==3.18.0",
                "python-hostlist==2.3.0",
                "smmap==5.0.3",
                "torch-ema==0.3",
                "torchmetrics==1.9.0",
                "wcwidth==0.9.4",
            ),
        ),
        package="mace-torch==0.3.16",
        argv=(
            "-m", "mace.cli.run_train", "--name=MACE_model", "--train_file=train.xyz",
            "--valid_fraction=0.05", "--E0s=average", "--model=MACE",
            "--hidden_irreps=128x0e + 128x1o", "--r_max=5.0", "--batch_size=10",
            "--max_num_epochs=1500", "--stage_two", "--start_stage_two=1200", "--ema",
            "--ema_decay=0.99", "--amsgrad", "--restart_latest", "--device=cuda",
        ),
        prepare=((*_DATA, "molecules", "{work}"),),
        checks=(share("optimizer_state", 3 * 8 * _MACE),),
        floor=Reference(
            6 * 8 * _MACE, "0.85 M × 48 bytes: fp64, three moments, the averaged weights included"
        ),
        script="`mace_run_train --model=MACE --hidden_irreps='128x0e + 128x1o' --ema --amsgrad …`, "
        "its README's command",
    ),
)  # fmt: skip
