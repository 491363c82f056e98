"""Sparse tensors in coordinates (COO): an operator is what its CUDA kernel does to their parts.

A sparse tensor has no storage of its own. It consists of `indices`, int64 [sparse dimensions, nnz],
and `values`, [nnz, dense dimensions…]. Both are ordinary tensors, and so is their memory; PyTorch's
fake sparse tensor only holds them together. Sources are under `aten/src/ATen/native/sparse/` in
PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.fake.arguments import flat
from memplan.capturing.fake.plain_class import set_data
from memplan.capturing.operators.fake import run_fake
from memplan.capturing.state import CaptureState, Handler

aten = torch.ops.aten

_PLAIN = (
    *("_indices", "indices", "_values", "values", "_nnz", "is_coalesced", "_coalesced_"),
    *("sparse_dim", "dense_dim", "_dimI", "_dimV"),
)
"""They allocate nothing, so PyTorch's own rules apply."""


def is_sparse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor in coordinates is among the arguments."""
    return any(
        tensor.layout is torch.sparse_coo
        for item in (*args, *kwargs.values())
        for tensor in flat([item], torch.Tensor)
    )


def run_sparse(state: CaptureState, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator with a sparse argument. Raises CaptureError for one without a rule."""
    name = func._opname
    if name in _PLAIN:
        return state.fake_mode.dispatch(func, (), args, kwargs)
    rule = _RULES.get(name)
    result = NotImplemented if rule is None else rule(state, func, args, kwargs)
    if result is NotImplemented:
        state.refuse_sparse(next(t for t in flat([*args], torch.Tensor) if t.is_sparse), func)
    return result


def of_parts(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a sparse tensor from its parts."""
    state.has_sparse = True
    args, kwargs, _ = state.without_real(args, kwargs)
    return state.fake_mode.dispatch(func, (), args, kwargs)


def of_dense(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`native/TensorConversions.cpp`: the coordinates of what is not zero, and the values there."""
    dense, *dims = args
    layout = kwargs.get("layout") or torch.sparse_coo
    if (
        layout is not torch.sparse_coo
        or kwargs.get("dense_dim")
        or not dense.dim()
        or dims not in ([], [dense.dim()])
    ):
        return NotImplemented
    with state.mode:
        found = dense.nonzero().T  # stays until the end
        indices = found.clone()
        values = dense[tuple(indices)].clone()
    return _made(state, (indices, values), dense.shape, coalesced=True)


def embedding_bag_backward(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`native/EmbeddingBag.cpp`: with `sparse`, the CUDA function is made of other operators."""
    gradient, indices, offsets, bags, sizes, _, rows, by_frequency, mode, sparse, *rest = args
    if not sparse:
        return NotImplemented
    of_bags = gradient, indices, offsets, bags, sizes
    with state.mode:
        return aten._embedding_bag_sparse_backward(*of_bags, rows, by_frequency, mode, *rest)


def _parts(state: CaptureState, tensor: torch.Tensor) -> list[Any]:
    if not isinstance(tensor, FakeTensor):
        return [tensor._indices(), tensor._values()]
    rules = (aten._indices.default, aten._values.default)
    return [state.fake_mode.dispatch(rule, (), (tensor,), {}) for rule in rules]


def _made(
    state: CaptureState, parts: Sequence[Any], size: Sequence[int], *, coalesced: bool = False
) -> FakeTensor:
    indices, values = parts
    dims = (indices.shape[0], values.dim() - 1, [*size], indices, values)
    options = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
    make = aten._sparse_coo_tensor_with_dims_and_tensors.default
    made: FakeTensor = of_parts(state, make, dims, options)
    if coalesced:
        state.fake_mode.dispatch(aten._coalesced_.default, (), (made, True), {})
    return made


def _empty(state: CaptureState, like: Any, *shape: int, dtype: torch.dtype | None = None) -> Any:
    options = {} if dtype is None else {"dtype": dtype}
    return run_fake(state, aten.new_empty.default, (like, [*shape]), options)


def _coalesce(state: CaptureState, func: Any, args: Any, _kwargs: Any) -> Any:
    """`cuda/SparseCUDATensor.cu`: indices and their order are sorted by a merge sort, which needs a
    copy of both; the result keeps the storage of all indices."""
    source = args[0]
    indices, values = _parts(state, source)
    dims, nnz = indices.shape
    known = state.values.of(indices)
    unique = min(nnz, source.shape[:dims].numel())
    if known is not None:
        unique = torch.unique(known, dim=1).shape[1]
    else:
        text = "a sparse tensor's indices that are not known are all different"
        state.assume("shape", text, op=str(func))
    keys = _empty(state, indices, dims if dims == 1 else 1, nnz)
    order = [_empty(state, indices, nnz) for _ in range(2)]
    temporary = _empty(state, indices, 2, nnz)
    del temporary
    summed = _empty(state, values, unique, *values.shape[1:])
    if dims > 1:
        keys = _empty(state, indices, dims, unique)
    del order
    keys = run_fake(state, aten.slice.Tensor, (keys, 1, 0, unique), {})
    return _made(state, (keys, summed), source.shape, coalesced=True)


def _coalesced(state: CaptureState, func: Any, source: Any) -> Any:
    return source if source.is_coalesced() else _coalesce(state, func, (source,), {})


def _clone(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`clone` and `to`. A gradient that nothing else holds becomes its parameter's without a copy
    (`torch/csrc/autograd/functions/accumulate_grad.h`); under a dispatch mode the engine clones
    it."""
    source = args[0]
    indices, values = _parts(state, source)
    in_engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    if in_engine and func is aten.clone.default and values.is_contiguous():
        return _made(state, (indices, values), source.shape)
    kwargs = {name: item for name, item in kwargs.items() if name != "layout"}
    values = run_fake(state, func, (values,), kwargs)
    kwargs.pop("dtype", None)
    indices = run_fake(state, func, (indices,), kwargs)
    return _made(state, (indices, values), source.shape, coalesced=source.is_coalesced())


def _detach(state: CaptureState, _func: Any, args: Any, _kwargs: Any) -> Any:
    source = args[0]
    return _made(state, _parts(state, source), source.shape, coalesced=source.is_coalesced())


def _mask(state: CaptureState, _func: Any, args: Any, _kwargs: Any) -> Any:
    """`SparseTensor.cpp`, `SparseTensorMath.cpp`: those elements of a dense tensor that a sparse
    one has, times ones."""
    dense, mask = args[:2]
    if dense.layout is not torch.strided:
        return NotImplemented
    indices = _parts(state, mask)[0]
    ones = run_fake(state, aten.ones.default, ([1],), {"device": dense.device})
    found = run_fake(state, aten.index.Tensor, (dense, [*indices.unbind(0)]), {})
    copied = run_fake(state, aten.clone.default, (indices,), {})
    made = run_fake(state, aten.mul.Tensor, (found, ones), {})
    return _made(state, (copied, made), dense.shape, coalesced=mask.is_coalesced())


def _add(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`cuda/SparseCUDATensorMath.cu`: add rows to a dense tensor, or join two sparse ones."""
    left, right = args[:2]
    alpha = kwargs.get("alpha", 1)
    in_place = func._opname == "add_"
    if left.layout is torch.strided:
        indices, values = _parts(state, right)
        total = left if in_place else run_fake(state, aten.clone.default, (left,), {})
        if indices.shape[0] == 1:
            rows, places = total, indices[0]
        elif not total.is_contiguous():
            return NotImplemented
        else:  # as one index for each place, which a kernel for places that differ does without
            rows = total.view(-1, *values.shape[1:])
            places = indices[0] if right.is_coalesced() else _empty(state, indices, right._nnz())
        run_fake(state, aten.index_add_.default, (rows, 0, places, values), {"alpha": alpha})
        if rows is not total:
            state.values.forget(total)
        return total
    if right.layout is torch.strided:
        return NotImplemented
    first, second = _parts(state, left), _parts(state, right)
    if alpha != 1:
        second[1] = run_fake(state, aten.mul.Scalar, (second[1], alpha), {})
    joined = [
        run_fake(state, aten.cat.default, ([one, other], 1 - place), {})
        for place, (one, other) in enumerate(zip(first, second, strict=True))
    ]
    made = _made(state, joined, left.shape)
    if made._nnz() > made.numel():
        made = _coalesce(state, func, (made,), {})
    if not in_place:
        return made
    set_data(left, made)
    return left


def _zero(state: CaptureState, _func: Any, args: Any, _kwargs: Any) -> Any:
    indices, values = _parts(state, args[0])
    none = _empty(state, indices, indices.shape[0], 0), _empty(state, values, 0, *values.shape[1:])
    set_data(args[0], _made(state, none, args[0].shape))
    return args[0]


def _scaled(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """A sparse tensor times a number."""
    source, factor = args[:2]
    if isinstance(factor, torch.Tensor) and factor.dim():
        return NotImplemented
    indices, values = _parts(state, source)
    values = run_fake(state, func, (values, *args[1:]), kwargs)
    if func._schema.is_mutable:
        return source
    copied = run_fake(state, aten.clone.default, (indices,), {})
    return _made(state, (copied, values), source.shape, coalesced=source.is_coalesced())


def _transposed(state: CaptureState, _func: Any, args: Any, _kwargs: Any) -> Any:
    """`native/TensorShape.cpp`: a clone with swapped indices."""
    indices, values = _parts(state, args[0])
    if indices.shape[0] != 2 or args[0].dim() != 2:
        return NotImplemented
    copies = [run_fake(state, aten.clone.default, (part,), {}) for part in (indices, values)]
    return _made(state, copies, args[0].shape[::-1])


def _product(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`mm` and `addmm` in `cuda/SparseCUDATensorMath.cu`: for cuSPARSE the coordinates become
    compressed rows of int32, and the result is in column-major order until it is copied."""
    matrix, dense = args[-2:] if func._opname == "mm" else args[1:3]
    if matrix.layout is torch.strided or dense.layout is not torch.strided:
        return NotImplemented
    result = _empty(state, dense, matrix.shape[0], dense.shape[1])
    indices, values = _parts(state, _coalesced(state, func, matrix))
    nnz = indices.shape[1]
    row_starts = _empty(state, indices, matrix.shape[0] + 1, dtype=torch.int32)
    rows = _empty(state, indices, nnz, dtype=torch.int32)
    del rows
    columns = _empty(state, indices, nnz, dtype=torch.int32)
    by_columns = _empty(state, dense, *result.shape)
    if 1 not in dense.stride():
        dense = run_fake(state, aten.clone.default, (dense,), {})
    state.recorder.builder.op_work(
        flops=2 * nnz * dense.shape[1],
        moved_bytes=values.nbytes * 3 + nnz * dense[:1].nbytes + 3 * result.nbytes,
    )
    del row_starts, columns, by_columns
    return result


def _of_each(state: CaptureState, func: Any, args: Any, kwargs: Any) -> None:
    """`_foreach_…_` runs tensor by tensor (`native/ForeachOpsKernels.cpp`)."""
    one = getattr(aten, func._opname.removeprefix("_foreach_"))
    with state.mode:
        for i in range(len(args[0])):
            one(*(item[i] if isinstance(item, (list, tuple)) else item for item in args), **kwargs)


def _norm(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`SparseTensorMath.cpp`: the norm of the values, once those with equal indices are added."""
    source = _coalesced(state, func, args[0])
    return run_fake(state, func, (_parts(state, source)[1], *args[1:]), kwargs)


def _to_dense(state: CaptureState, _func: Any, args: Any, _kwargs: Any) -> Any:
    values = _parts(state, args[0])[1]
    zeros = run_fake(state, aten.new_zeros.default, (values, [*args[0].shape]), {})
    return _add(state, aten.add_.Tensor, (zeros, args[0]), {})


_RULES: dict[str, Handler] = {
    "_coalesce": _coalesce,
    "clone": _clone,
    "_to_copy": _clone,
    "detach": _detach,
    "alias": _detach,
    "sparse_mask": _mask,
    "add": _add,
    "add_": _add,
    "zero_": _zero,
    "mul": _scaled,
    "mul_": _scaled,
    "div": _scaled,
    "div_": _scaled,
    "transpose": _transposed,
    "t": _transposed,
    "mm": _product,
    "addmm": _product,
    "_sparse_addmm": _product,
    "_foreach_mul_": _of_each,
    "_foreach_add_": _of_each,
    "norm": _norm,
    "_to_dense": _to_dense,
}

HANDLERS: dict[Any, Handler] = {
    aten._sparse_coo_tensor_with_dims_and_tensors.default: of_parts,
    aten._to_sparse.default: of_dense,
    aten._to_sparse.sparse_dim: of_dense,
    aten._embedding_bag_backward.default: embedding_bag_backward,
}
