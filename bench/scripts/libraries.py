"""Packages that are used from a program of one's own: `bench/scripts/programs`, each run by
`-m bench.scripts.programs.NAME`."""

from __future__ import annotations

from itertools import pairwise

from bench.scripts.accelerate import SETUP as HUGGING_FACE
from bench.scripts.case import Reference, Setup, of_program, pinned
from bench.scripts.checks import share

_DATA = ("-m", "bench.scripts.datasets")
_MNIST = ((*_DATA, "mnist", "{work}/data"),)
_CLASSES = ((*_DATA, "classes", "{work}/images"),)
_MAKE = ("-m", "bench.scripts.make")
_BERT_CLASSIFIER = 109_483_778
_BERT = 109_482_240
_UNET = 35_711_491
_DETECTOR, _ANCHORS = 3_839_117, 975_072
"""Parameters of EfficientDet-D0 for 20 classes, bytes of its buffers."""
_SENTENCES = Setup(
    "sentence-transformers",
    wheels=(
        *HUGGING_FACE.wheels,
        *pinned("cloudpickle joblib narwhals scikit-learn sentence-transformers threadpoolctl"),
    ),
)


_VIT = 54_632_424
_RESNET18 = 11_181_642
_DECODER = 6 * (4 * 512 * 512 + 2 * 512 * 2048 + 5 * 512) + 2 * 256 * 512
"""Layers of attention without biases, a feed-forward of four times the width, the embeddings."""
_SCORES = 4 * 8 * 1024 * 1024 * 4


def _layers(*widths: int) -> int:
    """Parameters of linear layers one after another."""
    return sum((before + 1) * after for before, after in pairwise(widths))


_GRAPHS = (64 + 1) * 128 + (128 + 3) * 128 + (2 * 128 + 1) * 128 + (128 + 1) * 10
_Q_NETWORK = _layers(4, 64, 64, 2)
_ACTOR = _layers(3, 256, 256, 2)
_CRITICS = 2 * _layers(4, 256, 256, 1)
_AGENTS = pinned("cloudpickle farama-notifications gymnasium stable-baselines3")
_JIT = (
    "it imports `torch.distributed.optim`, whose functions TorchScript compiled against memplan's "
    "constructors",
    "TorchScript finds PyTorch's own",
)

CASES = (
    of_program(
        "transformers==5.23.0", "sequence_classification", wheels=(), setup=HUGGING_FACE,
        prepare=(
            (*_MAKE, "model", "{work}/bert", "bert", 'class="BertForSequenceClassification"'),
            (*_MAKE, "data", "{work}/pairs", "pairs", "320", "mrpc"),
        ),
        checks=(
            share("parameters", 4 * _BERT_CLASSIFIER, tolerance=0.005),
            share("optimizer_state", 8 * _BERT_CLASSIFIER),
        ),
        floor=Reference(16 * _BERT_CLASSIFIER, "109.5 M × 16 bytes"),
        name="transformers-trainer",
    ),
    of_program(
        "wandb==0.31.0", "logged",
        wheels=pinned(
            "certifi charset-normalizer gitdb gitpython googleapis-common-protos grpcio "
            "markdown opentelemetry-api opentelemetry-exporter-otlp-proto-common "
            "opentelemetry-exporter-otlp-proto-http opentelemetry-proto opentelemetry-sdk "
            "opentelemetry-semantic-conventions platformdirs requests sentry-sdk smmap "
            "tensorboard-data-server tensorboard urllib3 wandb xxhash werkzeug"
        ),
        checks=(share("parameters", 4 * 513 * 512), share("optimizer_state", 8 * 513 * 512)),
        floor=Reference(16 * 513 * 512, "0.26 M × 16 bytes"),
        found=(
            "the profiler (`with_stack=True`) took an object of memplan's for the module that runs",
            "the function in the place of `Module.__call__` names its module as PyTorch's does",
        ),
    ),
    of_program(
        "vit-pytorch==1.26.11", "vit_pytorch_classifier",
        wheels=pinned("einops torch-einops-utils vit-pytorch"),
        checks=(share("parameters", 4 * _VIT), share("optimizer_state", 8 * _VIT)),
        floor=Reference(16 * _VIT, "54.6 M × 16 bytes"),
    ),
    of_program(
        "x-transformers==2.31.10", "language_model",
        wheels=pinned("einops einx frozendict loguru torch-einops-utils x-transformers"),
        checks=(
            share("parameters", 4 * _DECODER),
            share("gradients", 4 * _DECODER),
            share("optimizer_state", 8 * _DECODER),
        ),
        floor=Reference(
            16 * _DECODER + 6 * _SCORES,
            "19.2 M × 16 bytes + the scores of six layers, 4 × 8 × 1,024 × 1,024",
        ),
    ),
    of_program(
        "torch-geometric==2.8.1", "graphs",
        wheels=pinned(
            "aiohttp certifi charset-normalizer joblib narwhals requests scikit-learn "
            "threadpoolctl torch-geometric urllib3 xxhash"
        ),
        checks=(share("parameters", 4 * _GRAPHS), share("optimizer_state", 8 * _GRAPHS)),
        floor=Reference(16 * _GRAPHS, "59,274 × 16 bytes"),
    ),
    of_program(
        "stable-baselines3==2.9.2", "agents", "DQN", wheels=_AGENTS,
        name="stable-baselines3-dqn",
        checks=(
            share("parameters", 4 * 2 * _Q_NETWORK), share("optimizer_state", 8 * _Q_NETWORK)
        ),
        floor=Reference(20 * _Q_NETWORK, "4,610 × 20 bytes, the target network included"),
    ),
    of_program(
        "stable-baselines3==2.9.2", "agents", "SAC", wheels=_AGENTS,
        name="stable-baselines3-sac",
        checks=(
            share("parameters", 4 * (_ACTOR + 2 * _CRITICS)),
            share("optimizer_state", 8 * (_ACTOR + _CRITICS)),
        ),
        floor=Reference(
            16 * (_ACTOR + _CRITICS) + 4 * _CRITICS,
            "0.20 M × 16 + 0.13 M × 4 bytes, the target networks included",
        ),
    ),
    of_program(
        "pytorch-metric-learning==2.9.0", "metric_learning", "{work}/data", prepare=_MNIST,
        wheels=pinned("joblib narwhals pytorch-metric-learning scikit-learn threadpoolctl"),
    ),
    of_program(
        "lightly==1.6.0", "contrastive", "{work}/images/train", prepare=_CLASSES,
        wheels=pinned(
            "certifi charset-normalizer lightly-utils lightly lightning-utilities requests "
            "urllib3"
        ),
    ),
    of_program(
        "pytorch-ignite==0.5.5", "engine", "{work}/data", prepare=_MNIST,
        wheels=("pytorch-ignite==0.5.5",), found=_JIT,
    ),
    of_program(
        "kornia==0.9.0", "augmented", wheels=("kornia-rs==0.2.0", "kornia==0.9.0"),
        checks=(share("optimizer_state", 8 * _RESNET18),),
        floor=Reference(16 * _RESNET18, "11.2 M × 16 bytes"),
    ),
    of_program(
        "segmentation-models-pytorch==0.6.0", "segmentation",
        wheels=("segmentation-models-pytorch==0.6.0",),
    ),
    of_program(
        "monai==1.6.1", "volumes", wheels=("monai==1.6.1",),
        found=(
            "`Tensor.as_subclass` refused a FakeTensor", "the job's tensors are of PyTorch's class"
        ),
    ),
    of_program(
        "denoising-diffusion-pytorch==2.3.4", "diffusion", "{work}/images/train",
        prepare=_CLASSES,
        wheels=pinned("denoising-diffusion-pytorch einops ema-pytorch pytorch-fid"),
        checks=(share("parameters", 2 * 4 * _UNET), share("optimizer_state", 8 * _UNET)),
        floor=Reference(20 * _UNET, "35.7 M × 20 bytes, the averaged weights included"),
    ),
    of_program(
        "sentence-transformers==6.2.0", "sentence_pairs", wheels=(), setup=_SENTENCES,
        prepare=(
            (*_MAKE, "model", "{work}/bert", "bert", 'class="BertModel"'),
            (*_MAKE, "data", "{work}/pairs", "pairs", "320"),
        ),
        checks=(share("parameters", 4 * _BERT), share("optimizer_state", 8 * _BERT)),
        floor=Reference(16 * _BERT, "109.5 M × 16 bytes"),
    ),
    of_program(
        "fastai==2.8.12", "learner", "{work}/images", prepare=_CLASSES,
        found=(
            "`Tensor.as_subclass` refused a FakeTensor", "the job's tensors are of PyTorch's class"
        ),
        wheels=pinned(
            "beartype certifi charset-normalizer cloudpickle contourpy cycler fastai fastcore "
            "fastdownload fastprogress fasttransform fonttools joblib kiwisolver matplotlib "
            "narwhals plum-dispatch pyparsing requests scikit-learn threadpoolctl urllib3"
        ),
    ),
    of_program(
        "effdet==0.4.1", "detector",
        wheels=(
            "antlr4-python3-runtime==4.9.3",
            "effdet==0.4.1",
            "omegaconf==2.3.0",
            "pycocotools==2.0.11",
        ),
        checks=(
            share("parameters", 4 * _DETECTOR + _ANCHORS),
            share("optimizer_state", 8 * _DETECTOR),
        ),
        floor=Reference(16 * _DETECTOR, "3.8 M × 16 bytes"),
    ),
)  # fmt: skip
