"""Packages with a training loop, an optimizer or automatic differentiation of their own: programs
as in their documentation, and their own commands."""

from __future__ import annotations

from bench.scripts.case import Case, Reference, Setup, of_program, pinned
from bench.scripts.checks import share

_DATA = ("-m", "bench.scripts.datasets")
_MNIST = ((*_DATA, "mnist", "{work}/data"),)
_CLASSES = ((*_DATA, "classes", "{work}/images"),)
_SKLEARN = pinned("cloudpickle joblib narwhals scikit-learn threadpoolctl")
_REQUESTS = pinned("certifi charset-normalizer requests urllib3")
_MATPLOTLIB = pinned("contourpy cycler fonttools kiwisolver matplotlib pyparsing")
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
        wheels=pinned("absl-py h5py keras ml-dtypes namex optree"),
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
            *pinned("addict mmengine opencv-python-headless platformdirs termcolor yapf"),
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
            *pinned(
                "cffi hyperpyyaml joblib pycparser ruamel.yaml.clib ruamel.yaml sentencepiece "
                "soundfile speechbrain torchaudio"
            ),
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
                *pinned(
                    "alembic backports.zstd class-resolver click-default-group colorlog "
                    "dataclasses-json docdata mako marshmallow more-click more-itertools optuna "
                    "pykeen pystow sqlalchemy tabulate torch-max-mem torch-ppr typing-inspect"
                ),
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
                *pinned(
                    "ase configargparse e3nn gitdb gitpython h5py lightning-utilities lmdb "
                    "mace-torch matscipy opt-einsum-fx opt-einsum orjson prettytable "
                    "python-hostlist smmap torch-ema torchmetrics wcwidth"
                ),
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
