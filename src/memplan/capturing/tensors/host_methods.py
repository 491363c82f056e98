"""Methods with which a script looks at a tensor from Python: printing, lists, NumPy, addresses.

A fake tensor refuses most of them or answers for its metadata; here they answer with the values
that are known or assumed, and with addresses that do not overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.fake.plain_class import is_fake
from memplan.capturing.operators.data_dependent import MAX_READ_BACK, read_back
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState

_ADDRESS = "_memplan_address"
_ALIGNMENT = 512
_BASE = 1 << 40


def install(patches: Patches, state: CaptureState) -> None:
    """Patch `Tensor` and `UntypedStorage` until `patches.undo()`."""
    addresses = _Addresses()

    def host(tensor: FakeTensor) -> torch.Tensor:
        """The values; a large tensor's are zeros that no memory page backs."""
        if tensor.numel() <= MAX_READ_BACK:
            return read_back(state, tensor)
        # NumPy's zeros come from calloc: pages that nobody writes cost nothing.
        import numpy as np

        flat = torch.from_numpy(np.zeros(tensor.numel() * tensor.element_size(), dtype=np.uint8))
        return flat.view(tensor.dtype).view(tensor.shape)

    def to_numpy(tensor: FakeTensor, *, force: bool = False) -> Any:
        if tensor.fake_device.type != "cpu" and not force:
            raise TypeError(
                f"can't convert {tensor.fake_device} device type tensor to numpy. Use Tensor.cpu() "
                "to copy the tensor to host memory first."
            )
        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        return host(tensor).numpy()

    def to_array(tensor: FakeTensor, dtype: Any = None, copy: bool | None = None) -> Any:
        # NumPy asks without `copy` where PyTorch's own method is found not to take it.
        array = to_numpy(tensor)
        return array if dtype is None else array.astype(dtype, copy=False)

    def to_list(tensor: FakeTensor) -> Any:
        return host(tensor).tolist()

    answers: dict[str, Callable[..., Any]] = {
        "tolist": to_list,
        "numpy": to_numpy,
        "__array__": to_array,
        "data_ptr": addresses.of_tensor,
        "share_memory_": lambda tensor: tensor,  # on a card they all are, as `is_shared` says
        "is_shared": lambda tensor: tensor.fake_device.type != "cpu",
    }
    for name, answer in answers.items():
        patches.set(torch.Tensor, name, _for_fakes(answer, getattr(torch.Tensor, name)))
    real_data_ptr = torch.UntypedStorage.data_ptr

    def storage_data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type == "meta":
            return addresses.of_storage(storage)
        return real_data_ptr(storage)

    patches.set(torch.UntypedStorage, "data_ptr", storage_data_ptr)


def _for_fakes(answer: Callable[..., Any], real: Callable[..., Any]) -> Any:
    """The method of tensors that is `answer` for fake ones."""

    @functools.wraps(real)
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (answer if is_fake(tensor) else real)(tensor, *args, **kwargs)

    return method


class _Addresses:
    """Made-up addresses, as far apart as the storages are large."""

    def __init__(self) -> None:
        self._next = _BASE

    def of_storage(self, storage: torch.UntypedStorage) -> int:
        if storage.nbytes() == 0:
            return 0
        address: int | None = getattr(storage, _ADDRESS, None)
        if address is None:
            address = self._next
            self._next += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            setattr(storage, _ADDRESS, address)
        return address

    def of_tensor(self, tensor: torch.Tensor) -> int:
        if tensor.numel() == 0:
            return 0
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return self.of_storage(tensor.untyped_storage()) + offset
