"""Batch norm under gradient accumulation: which layers it concerns, and a momentum that fits.

Batch norm normalises each micro-batch by its own mean and variance, so accumulation cannot make it see the whole batch;
that would take all micro-batches at once. What can be made right is the weight of a cycle in the running statistics: n
updates with momentum m forget ``1 - (1 - m) ** n`` of the past, where one big batch forgets m.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms in training mode that keep running statistics, by path."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.track_running_stats and part.training
    }


def notice(module: nn.Module, advice: str = "") -> str | None:
    """What to say of ``module`` when its gradients are accumulated; ``None`` where no batch norm is trained."""
    names = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm) and part.training]
    if not names:
        return None
    shown = ", ".join(f"`{name}`" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"Batch norm sees micro-batches, not the whole batch that is accumulated: {shown}. Group norm or layer norm "
        f"would make no difference between the two. {advice}".rstrip()
    )


def momentum_in_cycle(momentum: float, index: int, length: int) -> float:
    """The momentum of one micro-batch, with which a cycle weighs as one big batch and each micro-batch the same.

    After ``length`` updates of a running statistic r with statistics ``s_i``, it is
    ``(1 - momentum) * r + momentum * mean(s_i)``: the update of the big batch, were it done with the mean of the
    micro-batches' statistics. (For equal sizes the mean is then the big batch's own; the variance lacks the variance of
    the micro-batches' means.)

    Args:
        momentum: That of the layer, for one big batch.
        index: Place of the micro-batch in its cycle, from 0.
        length: Micro-batches of the cycle.

    Example:
        >>> momenta = [momentum_in_cycle(0.1, index, 4) for index in range(4)]
        >>> forgotten = 1.0
        >>> for momentum in momenta:
        ...     forgotten *= 1.0 - momentum
        >>> round(forgotten, 12)
        0.9
    """
    share = momentum / length
    return share / (1.0 - (length - 1 - index) * share)


@contextmanager
def scaled_momentum(layers: Iterable[_BatchNorm], index: int, length: int) -> Iterator[None]:
    """Give ``layers`` the momentum of one micro-batch. One without a momentum averages over all batches: left alone."""
    changed = [(layer, layer.momentum) for layer in layers if layer.momentum is not None]
    try:
        for layer, momentum in changed:
            layer.momentum = momentum_in_cycle(momentum, index, length)
        yield
    finally:
        for layer, momentum in changed:
            layer.momentum = momentum
