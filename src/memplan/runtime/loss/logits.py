"""`Logits`: a head's output that is not computed before somebody needs it whole.

What a script does to logits before it reduces them is remembered: views of rows, and functions of
each row by itself (casts, a division by a temperature, a cap by tanh, log_softmax). A reduction
(cross entropy, a gather of the labels' entries, argmax, logsumexp) is then computed a chunk of rows
at a time. Anything else computes the logits as the script would have, once: each of its operators
runs in the same order on the same tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from memplan.runtime.loss.rows import Head, Reduction, RowWise, linear, reduce_rows

Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {}
"""For each function, a handler that gives its result without computing the logits, or
NotImplemented. It is called with the function, the logits, and the function's further arguments,
none of which are logits."""
_ASKED = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "requires_grad")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.stride}


class Logits(Tensor):
    """Deferred logits `[…, classes]`, as a head gives them. `deferred` makes them."""

    of: Deferred

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKED:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            result = _without_computing(func, handler, args, kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(_computed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Below autograd it is too late: what is computed here would have no gradients.
        raise RuntimeError(
            f"{func} was called on logits that memplan had not computed, by a way that PyTorch's "
            "functions are not told of; run without the plan's part `loss`, and please report the "
            "model"
        )


class Deferred:
    """How one `Logits` comes about: from a head's call, or from another by an operator."""

    def __init__(
        self,
        call: Call,
        rows: Tensor,
        compute: Callable[[], Tensor],
        row_wise: tuple[RowWise, ...] = (),
        classes_at: int = -1,
    ) -> None:
        self.call = call
        self.rows = rows
        """The head's input for these logits: `[…, features]`."""
        self.row_wise = row_wise
        self.classes_at = classes_at
        """The dimension of the classes; -1 for the last one, as the head gives it."""
        self._compute = compute
        self._computed: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._computed is None:
            # Its operators ran with gradients, whoever asks for the result.
            with torch.inference_mode(False), torch.enable_grad():
                self._computed = self._compute()
        return self._computed

    def reduced(self, reduction: Reduction, *others: Tensor) -> Tensor:
        """A reduction of every row. `others` have the shape of the logits but for the classes, and
        whatever dimensions follow."""
        self.call.check()
        lead = self.rows.shape[:-1]
        flat = self.rows.reshape(-1, self.rows.shape[-1])
        ready = [other.reshape(-1, *other.shape[len(lead) :]) for other in others]
        found = reduce_rows(self.call.head, self._all_row_wise, reduction, flat, *ready)
        return found.reshape(*lead, *found.shape[1:])

    def _all_row_wise(self, logits: Tensor) -> Tensor:
        for one in self.row_wise:
            logits = one(logits)
        return logits


class Call:
    """One call of a head, whose input and weight must still be what they were when it is used."""

    def __init__(self, head: Head, features: Tensor) -> None:
        self.head = head
        self.computed = False
        """Whether the logits exist, so that chunks would save nothing."""
        self._used = [(tensor, tensor._version) for tensor in (features, head.weight)]

    def check(self) -> None:
        """Raises RuntimeError where computing now would give other numbers than then."""
        if any(tensor._version != version for tensor, version in self._used):
            raise RuntimeError(
                "logits are used after the head's weight or input was changed in place, and "
                "memplan had not computed them; run without the plan's part `loss`"
            )

    def compute(self, features: Tensor) -> Tensor:
        self.check()
        self.computed = True
        with self.head.autocast.again():
            return linear(features, self.head.weight, self.head.bias)


def deferred(head: Head, features: Tensor) -> Logits:
    """What `linear(features, head.weight, head.bias)` would be."""
    call = Call(head, features)
    of = Deferred(call, features, functools.partial(call.compute, features))
    with head.autocast.again(), torch.no_grad():
        few = linear(features.new_empty(1, features.shape[-1]), head.weight[:1])
    return _logits(of, few.dtype)


def then(
    before: Logits,
    compute: Callable[[Tensor], Tensor],
    *,
    rows: Tensor | None = None,
    row_wise: RowWise | None = None,
    classes_at: int = -1,
) -> Logits:
    """`compute(before)`, which is either other rows of it or a function of each row."""
    old, dtype = before.of, before.dtype
    functions = old.row_wise
    if row_wise is not None:
        functions = (*functions, row_wise)
        with torch.no_grad():
            dtype = row_wise(old.rows.new_empty(1, 1, dtype=dtype)).dtype
    of = Deferred(
        old.call,
        old.rows if rows is None else rows,
        lambda: compute(old.tensor()),
        functions,
        classes_at,
    )
    return _logits(of, dtype)


def _logits(of: Deferred, dtype: torch.dtype) -> Logits:
    *lead, _ = of.rows.shape
    shape = [*lead]
    shape.insert(len(lead) if of.classes_at < 0 else of.classes_at, len(of.call.head.weight))
    found: Any = Tensor._make_wrapper_subclass(
        Logits, shape, dtype=dtype, device=of.rows.device, requires_grad=True
    )
    found.of = of
    with torch._C.DisableTorchFunction():
        found.register_hook(_lost)
    return found  # type: ignore[no-any-return]


def _lost(_gradient: Tensor) -> None:
    raise RuntimeError(
        "a function with a backward of its own was given logits that memplan had not computed, and "
        "their gradient would be lost; run without the plan's part `loss`"
    )


def _without_computing(func: Any, handler: Handler, args: Any, kwargs: dict[str, Any]) -> Any:
    if args:
        first, *rest = args
    else:
        kwargs = dict(kwargs)
        first, rest = kwargs.pop("input", None), []
    if type(first) is not Logits or first.of.call.computed:
        return NotImplemented
    if any(type(item) is Logits for item in tree_leaves((rest, kwargs))):
        return NotImplemented
    result = handler(func, first, *rest, **kwargs)
    # Without gradients, as in a function with a backward of its own, nothing more is put off.
    late = not torch.is_grad_enabled() and any(type(one) is Logits for one in tree_leaves(result))
    return NotImplemented if late else result


def _computed(item: Any) -> Any:
    return item.of.tensor() if type(item) is Logits else item
