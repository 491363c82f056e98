"""The options of a script that decide how much memory a step needs: batch size, sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from memplan.capturing.options import ScriptTarget
from memplan.fit.options import (
    Declared,
    NumericOption,
    declared_options,
    find_value,
    given_options,
    plain_name,
)

Kind = Literal["batch_size", "sequence_length", "image_size"]
_NAMES: dict[Kind, str] = {
    "batch_size": (
        "batch batch_size bs bsz mbs train_batch train_batch_size batch_size_train"
        " per_device_train_batch_size per_device_batch_size device_batch_size local_batch_size"
        " micro_batch micro_batch_size microbatch_size per_gpu_train_batch_size samples_per_gpu"
    ),
    "sequence_length": (
        "seq seq_len seq_length seqlen seqlength sequence_length sequence_len block_size context"
        " context_length context_len context_size ctx_len n_ctx length max_length max_len"
        " max_seq_len max_seq_length max_sequence_length model_max_length cutoff_len"
    ),
    "image_size": (
        "image_size img_size imgsz image_res img_res resolution crop_size train_crop_size"
        " input_size"
    ),
}
_ACCUMULATION = frozenset(
    {
        *("gradient_accumulation_steps", "gradient_accumulation", "grad_accumulation_steps"),
        *("grad_accum_steps", "grad_accum", "grad_acc_steps", "accumulation_steps"),
        *("accumulate_steps", "accumulate", "accumulate_grad_batches", "accum_steps"),
        *("accum_freq", "accum_iter", "gradient_accumulation_step", "accum", "accumulation"),
        *("grad_acc", "acc_steps", "grad_accumulation", "grad_accum_every"),
        # Of a pipeline's schedule, which has as many in flight whatever their size.
        *("micro_batches", "microbatches", "num_micro_batches", "num_microbatches"),
        *("n_micro_batches", "n_microbatches"),
    }
)


@dataclass(frozen=True)
class Knob:
    """An option and the value in force."""

    kind: Kind
    option: str
    """The option as it is typed: `--batch-size`."""
    value: int


def find_knobs(program: ScriptTarget) -> list[Knob]:
    """The options that a search may change, at most one of each kind, the batch size first. An
    option on the command line is taken first, by the last part of a dotted name
    (`train.batch_size=8`) where only one has it. Otherwise the first one that the source declares
    with a positive integer as its default, unless the command line has it with a value that is no
    such integer (`auto`, `-1`) or in a way that is not read (`-b8`, `--batch-s 8`)."""
    declared = list(_declared(program))
    aliases = {option: kind for kind, one in declared for option in one.names}
    found: dict[Kind, Knob] = {}
    dotted: dict[Kind, dict[str, Knob]] = {}
    for option, text in given_options(program.argv):
        kind = aliases.get(option) or kind_of([_last_part(option)])
        if kind is not None and text.isdecimal() and int(text) > 0:
            knob = Knob(kind, option, int(text))
            if "." in option:
                dotted.setdefault(kind, {})[plain_name(option)] = knob
            else:
                found[kind] = knob
    for kind, knobs in dotted.items():
        if len(knobs) == 1:
            found.setdefault(kind, *knobs.values())
    for kind, one in declared:
        if one.default > 0 and not _is_typed(program, one):
            found.setdefault(kind, Knob(kind, one.longest, one.default))
    return [found[kind] for kind in _NAMES if kind in found]


def find_accumulation(program: ScriptTarget) -> NumericOption | None:
    """The option that says how many batches make an update, and its value."""
    found = find_value(program, _ACCUMULATION)
    return found if found is not None and found.value > 0 else None


def _is_typed(program: ScriptTarget, option: Declared) -> bool:
    """Whether the command line has the option in any way that argparse takes."""
    typed = {word.partition("=")[0] for word in program.argv}
    if typed & set(option.names):
        return True
    typed -= {name for one in declared_options(program) for name in one.names}
    return any(
        name.startswith(word) if name.startswith("--") else word.startswith(name)
        for name in option.names
        for word in typed
        if len(word) > 2
    )


def _last_part(option: str) -> str:
    return option.rpartition(".")[2]


def kind_of(options: list[str]) -> Kind | None:
    """What an option of these names decides; None for any other."""
    names = {plain_name(option) for option in options}
    return next((kind for kind, known in _NAMES.items() if names & set(known.split())), None)


def _declared(program: ScriptTarget) -> Iterator[tuple[Kind, Declared]]:
    for one in declared_options(program):
        kind = kind_of(one.names)
        if kind is not None:
            yield kind, one
