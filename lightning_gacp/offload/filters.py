"""Which saved tensors are worth moving, and which must not be moved."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_gacp.offload.device import Device
from lightning_gacp.offload.records import root_of

_LEAST_SHARE = 8
"""A tensor that is less than this part of its storage stays. The slices of a fused projection are more."""


def storage_address(tensor: Tensor) -> int | None:
    """What tells storages apart, or ``None`` for a tensor without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


class Filter:
    """Decides for one call of a block which of the tensors it saves stay on the device, and why.

    Weights do not reach autograd as parameters but as plain views of them (``weight.t()``), and under FSDP2
    a block's parameters are other tensors in its forward than outside. So it is made in the forward, and compares
    storages.

    Args:
        block: The block whose forward runs.
        device: Where tensors may be moved from.
        min_bytes: Smaller tensors stay.
    """

    def __init__(self, block: nn.Module, device: Device, min_bytes: int) -> None:
        self._block = block
        self._device = device
        self._min_bytes = min_bytes
        self._state: set[int | None] | None = None
        self._frozen: dict[tuple[int, ...], set[torch.dtype]] = {}

    def reason_to_keep(self, tensor: Tensor) -> str | None:
        """Why ``tensor`` has to stay on the device, or ``None``."""
        if type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
            return "tensor subclass"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor():
            return "not a dense layout"
        if not self._device.owns(tensor):
            return "on another device"
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._min_bytes or nbytes == 0:
            return "smaller than min_bytes"
        base = root_of(tensor)
        if isinstance(base, nn.Parameter) or storage_address(tensor) in self._weights():
            return "parameter or buffer"
        if self._is_cast_of_weight(tensor, base):
            return "cast of a parameter"
        if tensor.is_conj() or tensor.is_neg():
            return "lazily conjugated"
        if base.numel() * base.element_size() != nbytes:
            return "part of a storage without being a view"
        if tensor.numel() * tensor.element_size() * _LEAST_SHARE < nbytes:
            return "small part of its storage"
        return None

    def _weights(self) -> set[int | None]:
        """Storages of the block's parameters and buffers, looked up when the first large tensor comes."""
        if self._state is None:
            parameters = list(self._block.parameters())
            self._state = {storage_address(tensor) for tensor in _chain(parameters, self._block.buffers())}
            for weight in parameters:
                if not weight.requires_grad:
                    for shape in (tuple(weight.shape), tuple(weight.shape)[::-1]):  # casts are often saved transposed
                        self._frozen.setdefault(shape, set()).add(weight.dtype)
        return self._state

    def _is_cast_of_weight(self, tensor: Tensor, base: Tensor) -> bool:
        """Whether autocast has made ``tensor`` from a parameter.

        Of a trainable parameter the graph says so. The cast of a frozen one leaves no trace (and inside of the
        operation autocast says that it is off), so there shape and dtype must do: an activation that needs no gradient
        and has the shape of a frozen weight in another dtype is too rare to matter, and then only stays.
        """
        made_by = base.grad_fn
        if made_by is not None:
            if not made_by.name().startswith("ToCopyBackward"):
                return False
            origin = made_by.next_functions[0][0]
            return isinstance(getattr(origin, "variable", None), nn.Parameter)
        if base.requires_grad or not base.is_floating_point():
            return False
        dtypes = self._frozen.get(tuple(base.shape), set())
        return bool(dtypes) and base.dtype not in dtypes


def _chain(*groups: Iterable[Tensor]) -> Iterable[Tensor]:
    for group in groups:
        yield from group
