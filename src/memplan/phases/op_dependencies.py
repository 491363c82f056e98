"""Finds which operators of a traced step must stay in order."""

from __future__ import annotations

from collections.abc import Sequence

_PLAIN = frozenset({"aten", "prims", "prim", "torchvision"})
_READ_BY_PYTHON = frozenset(
    {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select"}
)
"""Python sees the value, or a shape that depends on it, and may decide by it what comes next."""
_RANDOM = frozenset(
    {
        "native_dropout", "dropout", "dropout_", "alpha_dropout", "feature_dropout",
        "_fused_dropout", "bernoulli", "bernoulli_", "uniform", "uniform_", "normal", "normal_",
        "normal_functional", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like",
        "randperm", "random", "random_", "multinomial", "exponential", "exponential_", "geometric",
        "geometric_", "cauchy", "cauchy_", "log_normal", "log_normal_", "poisson", "binomial",
        "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise", "rrelu_with_noise_",
        "_cudnn_rnn", "_cudnn_init_dropout_state", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
        "_efficient_attention_forward", "_cudnn_attention_forward",
    }
)  # fmt: skip
"""They draw from the generator, or may: their order decides what each draws."""


def dependencies(
    names: Sequence[str], reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]
) -> list[set[int]]:
    """The operators that must run before each operator. They are the last writer of each storage
    that it reads or writes; for storages that it writes, also the readers since then; the previous
    operator that may draw random numbers, for one that may, too; the previous collective or
    operator of another library, for such a one, because these may have effects that are not
    recorded; and the last operator whose value Python read."""
    needs: list[set[int]] = [set() for _ in names]
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    random, foreign, read_by_python = -1, -1, -1
    for op, name in enumerate(names):
        for storage in (*reads[op], *writes[op]):
            needs[op].add(writer.get(storage, -1))
        for storage in writes[op]:
            needs[op].update(readers.get(storage, ()))
        for storage in reads[op]:
            readers.setdefault(storage, []).append(op)
        for storage in writes[op]:
            writer[storage] = op
            readers[storage] = []
        needs[op].add(read_by_python)
        namespace, _, rest = name.partition(".")
        operator = rest.partition(".")[0]
        if operator in _RANDOM:
            needs[op].add(random)
            random = op
        if namespace not in _PLAIN:
            needs[op].add(foreign)
            foreign = op
        if operator in _READ_BY_PYTHON:
            read_by_python = op
        needs[op] -= {-1, op}
    return needs
