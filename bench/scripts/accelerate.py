"""Accelerate's own test scripts, those that train."""

from __future__ import annotations

from bench.scripts.case import Case, Reference, Setup, pinned
from bench.scripts.checks import share, share_at_least

SETUP = Setup(
    "hugging_face",
    wheels=pinned(
        "accelerate charset-normalizer certifi datasets dill evaluate multiprocess peft pyarrow "
        "requests transformers trl urllib3 xxhash"
    ),
)
"""Shared with the other packages of the family."""
_ALONE = Setup("accelerate", wheels=("accelerate==1.15.0",))
"""Where datasets 5.2 and pyarrow 26 are, `test_script` fails by itself, on any machine."""

_SCRIPTS = "{site}/accelerate/test_utils/scripts"
_BERT = (
    ("-m", "bench.scripts.make", "model", "{work}/bert", "bert",
     'class="BertForSequenceClassification"'),
    ("-m", "bench.scripts.make", "data", "{work}/nyu-mll/glue", "pairs", "320", "mrpc"),
    ("-m", "bench.scripts.make", "metric", "{work}/glue"),
)  # fmt: skip
_BERT_BYTES = 4 * 109_483_778  # transformers.BertForSequenceClassification, base, two labels
_BERT_CHECKS = (
    share("parameters", _BERT_BYTES, tolerance=0.005),
    share_at_least("optimizer_state", 2 * _BERT_BYTES),
)


_EPOCH = (
    "Accelerate's loaders have a batch in hand when they run dry, and the capture stopped there, "
    "before the evaluation; then the script misses steps of its learning rate",
    "a batch fetched ahead is trained on; a script that stumbles over its short epoch has been "
    "seen, as an assumption",
)


def _trains_bert(name: str, broke: str = "nothing", mended: str = "") -> Case:
    return Case(
        name="accelerate-" + name.removeprefix("test_").replace("_", "-"),
        setup=SETUP,
        package="accelerate==1.15.0",
        argv=(
            f"{_SCRIPTS}/external_deps/{name}.py", "--model_name_or_path", "bert",
        ),
        prepare=_BERT,
        checks=_BERT_CHECKS,
        floor=Reference(4 * _BERT_BYTES, "109.5 M × 16 bytes"),
        script=f"`external_deps/{name}.py`, BERT base",
        broke=broke,
        mended=mended,
    )  # fmt: skip


CASES = (
    Case(
        name="accelerate-script",
        setup=_ALONE,
        package="accelerate==1.15.0",
        argv=("-m", "accelerate.test_utils.scripts.test_script"),
        script="`-m accelerate.test_utils.scripts.test_script`",
        broke="`allclose` of device values was always true; `assert not torch.allclose(…)` failed",
        mended="known values are compared; unknown ones answer as the `assert` wants",
    ),
    Case(
        name="accelerate-sync",
        setup=SETUP,
        package="accelerate==1.15.0",
        argv=(f"{_SCRIPTS}/test_sync.py",),
        script="`test_sync.py`",
        broke="the same",
        mended="the same",
    ),
    _trains_bert("test_performance", *_EPOCH),
    _trains_bert("test_peak_memory_usage"),
    _trains_bert("test_checkpointing", "the same", "the same"),
)
