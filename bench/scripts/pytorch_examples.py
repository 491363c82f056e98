"""pytorch/examples, each as its README says."""

from __future__ import annotations

from bench.scripts.case import Case, Check, Reference, Setup, pinned
from bench.scripts.checks import share, share_at_least

SETUP = Setup(
    "pytorch_examples",
    wheels=(
        *pinned(
            "antlr4-python3-runtime boto3 botocore certifi charset-normalizer hydra-core jmespath"
        ),
        "omegaconf==2.3.0",
        *pinned("requests s3transfer six urllib3"),
    ),
)
_DATA = ("-m", "bench.scripts.datasets")
_MNIST = ((*_DATA, "mnist", "{work}/data"),)
_CLASSES = ((*_DATA, "classes", "{work}/images"),)


def _case(
    name: str,
    script: str,
    *arguments: str,
    launcher: tuple[str, ...] = (),
    prepare: tuple[tuple[str, ...], ...] = (),
    checks: tuple[Check, ...] = (),
    floor: Reference | None = None,
    cwd: str = "{work}/run",
    exit_codes: tuple[int, ...] = (0, 3),
    message: str = "",
    found: tuple[str, str] = ("nothing", ""),
    **environment: str,
) -> Case:
    place = "{third_party}/pytorch-examples/" + script
    return Case(
        name=f"examples-{name}",
        setup=SETUP,
        package="pytorch/examples",
        argv=(*launcher, place, *arguments),
        prepare=prepare,
        cwd=cwd,
        checks=checks,
        floor=floor,
        environment=environment,
        exit_codes=exit_codes,
        message=message,
        script=" ".join((f"`{script}`", *(f"`{word}`" for word in (*launcher, *arguments)))),
        broke=found[0],
        mended=found[1],
    )


_RANKS = ("--rank", "0", "torchrun", "--nnodes=1", "--nproc_per_node=4")
_TUTORIAL = "distributed/ddp-tutorial-series"
_PERSISTENT = (
    "its loaders' workers persist, and with them the capture ended before the evaluation: 547 MiB "
    "instead of 1.1 GiB",
    "another epoch of such a loader counts as another iterator",
)
_CONV_NET = 320 + 18_496 + 1_179_776 + 1_290
"""Parameters of the MNIST example: two convolutions, two linear layers."""
_RESNET50 = 25_557_032
_EVALUATED = 4 * 1000 * (64 * 24 * 24 + 32 * 26 * 26)
"""In its evaluation of 1,000 images: the second convolution's output, and its input."""
_SHARD = (2 * 32_000 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 768)) // 4
"""Of the tensor-parallel Llama of two layers, on one rank of 2 × 2."""
_ROTARY = 2 * 32_768 * 8 * 8
"""Complex numbers of 65,536 positions, on every rank."""

CASES = (
    _case(
        "mnist", "mnist/main.py", prepare=_MNIST, found=_PERSISTENT,
        checks=(share("optimizer_state", 8 * _CONV_NET), share_at_least("temporaries", _EVALUATED)),
        floor=Reference(12 * _CONV_NET + _EVALUATED, "1.2 M × 12 bytes + two results of 1,000 "
                        "images in the evaluation"),
    ),
    _case("mnist-rnn", "mnist_rnn/main.py", "--accel", prepare=_MNIST),
    _case("vae", "vae/main.py", prepare=_MNIST),
    _case("siamese", "siamese_network/main.py", prepare=_MNIST),
    _case(
        "gat", "gat/main.py", prepare=((*_DATA, "cora", "{work}/run/cora"),),
        checks=(share_at_least("activations", 2708 * 2708 * 8 * 4),),
        floor=Reference(2708 * 2708 * 8 * 4 * 3, "attention of 8 heads over 2,708 × 2,708 papers: "
                        "scores, masked scores and weights"),
    ),
    _case(
        "gcn", "gcn/main.py", exit_codes=(4,), message="--allow-network lets it download",
        prepare=((*_DATA, "cora", "{work}/run/cora"),),
        found=("it downloads its data in every run", "it is refused, with what would let it"),
    ),
    _case("dcgan", "dcgan/main.py", "--dataset", "fake", "--accel"),
    _case(
        "super-resolution", "super_resolution/main.py", "--upscale_factor", "3", "--accel",
        prepare=((*_DATA, "bsds", "{work}/run/dataset"),),
    ),
    _case(
        "neural-style", "fast_neural_style/neural_style/neural_style.py", "train", "--dataset",
        "{work}/images/train", "--style-image", "{work}/images/val/ant/0.jpg", "--save-model-dir",
        "out", "--accel",
        prepare=(*_CLASSES, (*_DATA, "weights", "{work}/hub/hub/checkpoints", "vgg16",
                             "vgg16-397923af.pth")),
        TORCH_HOME="{work}/hub",
    ),
    _case(
        "imagenet", "imagenet/main.py", "-a", "resnet50", "{work}/images", prepare=_CLASSES,
        floor=Reference(12 * _RESNET50 + 256 * 3 * 224 * 224 * 4, "25.6 M × 12 bytes and a batch"),
    ),
    _case("ddp-tutorial-single", f"{_TUTORIAL}/single_gpu.py", "50", "10"),
    _case("ddp-tutorial-spawn", f"{_TUTORIAL}/multigpu.py", "50", "10",
          launcher=("--world-size", "4", "--rank", "0")),
    _case("ddp-tutorial-torchrun", f"{_TUTORIAL}/multigpu_torchrun.py", "50", "10",
          launcher=_RANKS),
    _case("fsdp2", "distributed/FSDP2/example.py", launcher=_RANKS),
    _case("fsdp2-mixed", "distributed/FSDP2/example.py", "--mixed-precision",
          "--explicit-prefetching", "--dcp-api", launcher=_RANKS),
    _case("sequence-parallel", "distributed/tensor_parallelism/sequence_parallel_example.py",
          launcher=_RANKS),
    _case("fsdp-tensor-parallel", "distributed/tensor_parallelism/fsdp_tp_example.py",
          launcher=_RANKS,
          checks=(share("parameters", 4 * _SHARD + _ROTARY), share("gradients", 4 * _SHARD),
                  share("optimizer_state", 8 * _SHARD)),
          floor=Reference(16 * _SHARD + _ROTARY, "18.1 M × 16 bytes / 4 ranks + rotary tables")),
    _case(
        "mingpt-ddp", "distributed/minGPT-ddp/mingpt/main.py",
        "data_config.path={third_party}/pytorch-examples/distributed/minGPT-ddp/mingpt/data/input.txt",
        launcher=_RANKS,
    ),
)  # fmt: skip
