"""Optimizers whose state takes fewer bits, as changes for the user to make. What they save is
computed on the trace, not captured. `low_bit.py` has the one that a plan makes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Change
from memplan.fit.judge import Verdict, judge
from memplan.fit.options import calls, declared_options
from memplan.fit.state import State
from memplan.fit.what_if import Mask, with_less
from memplan.report.text import peak_text
from memplan.types.trace import Role, Trace

_8BIT = ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD")
"""Optimizers of `torch.optim` that bitsandbytes has with 8-bit state."""
_SHARDED_8BIT = ("Adam", "AdamW")
"""Optimizers that torchao has with 8-bit state, which `fully_shard` can shard."""
_SMALLEST = 4096
"""Elements of a parameter whose state becomes one of 8 bits; of both libraries."""
_BLOCK = 256
"""Elements that share a scale, a float32."""
_PLAIN_ONLY = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Arguments that these libraries' optimizers do not take."""
_BATCH_SIZE = "--per_device_train_batch_size"
"""A script with this option also has `--optim`: both are `TrainingArguments`."""
_WORDS_8BIT = "the optimizer's state in 8 bits, with a scale for each 256"
_WORDS_BF16 = "weights, gradients and state in bf16, with stochastic rounding"

_BY_PLAN = "; --allow numbers has a plan do it"


@dataclass(frozen=True)
class _Way:
    kind: Literal["optimizer_8bit", "optimizer_bf16"]
    bits: int
    words: str
    code: str
    less: Callable[[Trace], Trace]
    by_plan: str = ""


def smaller_states(plain: State, lowest: State) -> tuple[list[Change], list[str]]:
    """Optimizers with smaller state with which the job fits, without a plan where that is enough;
    and sentences about the others. Empty where the optimizer is not known or has no state.
    `lowest`: the state with the plan of the lowest peak. It is not used where it keeps optimizer
    state on the host or updates parameters in the backward pass, because neither works for these
    optimizers."""
    changes, tried = [], []
    states = [plain]
    parts = (lowest.plan.state, lowest.plan.low_bit, lowest.plan.order)
    if lowest is not plain and not any(parts):
        states.append(lowest)
    for way in _ways(plain) if _keeps_state(plain.captured.trace) else []:
        for state in states:
            found = judge(way.less(state.captured.trace), state.job.profile)
            if found.fits:
                changes.append(_change(way, found, recompute=state is not plain))
                break
        else:
            tried.append(f"{way.words} would not be enough: {peak_text(found.estimate)}")
    return changes, tried


def _change(way: _Way, verdict: Verdict, *, recompute: bool) -> Change:
    estimate = verdict.estimate
    trace = "the trace captured with the least-peak plan" if recompute else "the captured trace"
    return Change(
        kind=way.kind,
        option="",
        before=32,
        after=way.bits,
        fits=True,
        peak_bytes=estimate.peak_bytes,
        low_bytes=estimate.low_bytes,
        high_bytes=estimate.high_bytes,
        recompute=recompute,
        alloc_conf=verdict.alloc_conf,
        verified=f"computed on {trace}: {way.words}; another method, other numbers{way.by_plan}",
        code=way.code,
    )


def _ways(state: State) -> list[_Way]:
    program, sharded = state.job.program, state.job.ranks > 1
    made = next((call for call in calls(program) if _name(call) in _8BIT), None)
    ways = []
    if made is not None and _name(made) in (_SHARDED_8BIT if sharded else _8BIT):
        library = "torchao.optim" if sharded else "bitsandbytes.optim"
        code = _code(program, made, f"{library}.{_name(made)}8bit")
        by_plan = _BY_PLAN if _name(made) in _SHARDED_8BIT else ""
        ways.append(_Way("optimizer_8bit", 8, _WORDS_8BIT, code, in_8bit, by_plan))
    elif made is None and any(_BATCH_SIZE in one.names for one in declared_options(program)):
        code = "--optim adamw_bnb_8bit"
        ways.append(_Way("optimizer_8bit", 8, _WORDS_8BIT, code, in_8bit, _BY_PLAN))
    if made is not None and _name(made) in ("Adam", "AdamW"):
        code = _code(program, made, f"torchao.optim._{_name(made)}", "bf16_stochastic_round=True")
        code += ", after model.to(torch.bfloat16)"
        ways.append(_Way("optimizer_bf16", 16, _WORDS_BF16, code, _in_bf16))
    return ways


def _keeps_state(trace: Trace) -> bool:
    return bool((trace.storages.role == Role.OPTIMIZER_STATE).any())


def in_8bit(trace: Trace) -> Trace:
    """The trace as it would be with the optimizer's state in 8 bits and its scales, as far as
    bytes of state go: the update's temporaries stay, which libraries do without."""
    state = trace.storages.role == Role.OPTIMIZER_STATE
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        chosen = state & _of_dtype(trace, dtype)
        trace = with_less(trace, chosen, _BLOCK + 4, size * _BLOCK, least=size * _SMALLEST)
    return trace


def _in_bf16(trace: Trace) -> Trace:
    trained = np.isin(
        trace.storages.role, (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
    ) & _of_dtype(trace, "float32")
    return with_less(trace, trained, 1, 2)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _code(program: ScriptTarget, made: ast.Call, function: str, *more: str) -> str:
    """The line of the script that makes the optimizer, with another one."""
    kept = [word for word in made.keywords if word.arg not in _PLAIN_ONLY]
    arguments = [ast.unparse(one) for one in (*made.args, *kept)]
    return f"{program.name}:{made.lineno}: {function}({', '.join([*arguments, *more])})"


def _of_dtype(trace: Trace, dtype: str) -> Mask:
    """Storages of this type."""
    return np.array([text == dtype for text in trace.strings], bool)[trace.storages.dtype]
