"""Recomputation around the ``forward`` of one block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_gacp.checkpointing.arguments import Template, holds_containers, take_apart, warn_once, without_caches
from lightning_gacp.checkpointing.policies import Contexts, Policy, contexts_for, with_copies
from lightning_gacp.checkpointing.state import BufferHabits, StateBefore
from lightning_gacp.watching import RECOMPUTATION, Watch, no_watch

_DETERMINISM_CHECKS = ("default", "none")
_NOT_TRACED = (
    "a checkpointed block whose forward may change its buffers or the lists that it is given is not compiled: the "
    "graph breaks there. Use `fullgraph=False`"
)


class Recomputation:
    """The layer that `checkpoint_blocks` puts around a block."""

    def __init__(
        self, name: str, policy: Policy = "full", preserve_rng_state: bool = True, determinism_check: str = "default"
    ) -> None:
        if determinism_check not in _DETERMINISM_CHECKS:
            raise ValueError(f"`determinism_check={determinism_check!r}` must be one of {_DETERMINISM_CHECKS}.")
        self.name = name
        self.watch: Watch = no_watch
        self._contexts = contexts_for(policy)
        self._preserve_rng_state = preserve_rng_state
        self._determinism_check = determinism_check
        self._habits = BufferHabits()
        self.traceable = True
        """Whether a compiler may see through the checkpoint: see `is_traceable`."""

    def __call__(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``forward`` so that only its arguments are kept for the backward pass."""
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        prepared = without_caches(self.name, block, forward, args, kwargs)
        if prepared is None:
            return forward(*args, **kwargs)
        args, kwargs = prepared
        tensors, template = take_apart(args, kwargs)
        if torch.compiler.is_compiling() and self.traceable and not holds_containers(args, kwargs):
            # The compiler sees through the checkpoint and does by itself what `_Call` and `StateBefore` do.
            return self._checkpoint(
                lambda *given: _call(forward, template, given), tensors, early_stop=True, contexts=self._contexts
            )
        if torch.compiler.is_compiling():
            return self._run_uncompiled(block, forward, args, kwargs, tensors, template)
        return self._run(block, forward, args, kwargs, tensors, template)

    @torch.compiler.disable(reason=_NOT_TRACED)  # type: ignore[untyped-decorator, no-untyped-call]
    def _run_uncompiled(self, *call: Any) -> Any:
        warn_once(
            (type(call[0]).__qualname__, "uncompiled"),
            f"`{self.name}` is checkpointed and not compiled: it has buffers or is given lists, which its forward may "
            "change, and the compiler would recompute with the changed ones. Compile what is inside the block, or "
            "leave the block out of `blocks=`.",
        )
        return self._run(*call)

    def _run(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        template: Template,
    ) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"`{self.name}` is checkpointed, which does not work under the transforms of `torch.func`. "
                "Call `remove()` first, or the block's `eval()`.",
            )
        before = StateBefore(block)
        if before.is_lazy:
            return forward(*args, **kwargs)  # once: what this call makes, a recomputation would make again
        gives_away = self._contexts is not None
        call = _Call(self.name, forward, args, kwargs, template, before, self.watch, gives_away)
        contexts = None if self._contexts is None else partial(with_copies, self._contexts)
        output = self._checkpoint(call, tensors, early_stop=not before.has_inner_hooks, contexts=contexts)
        before.forget_unchanged(self._habits)
        return output

    def _checkpoint(
        self, function: Callable[..., Any], tensors: list[torch.Tensor], early_stop: bool, contexts: Contexts | None
    ) -> Any:
        given: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        return checkpoint(
            function,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=self._preserve_rng_state,
            determinism_check=self._determinism_check,
            early_stop=early_stop,
            **given,
        )


class _Call:
    """One call of a block, run a first time in the forward pass and again in the backward pass."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        template: Template,
        before: StateBefore,
        watch: Watch,
        gives_away: bool,
    ) -> None:
        self._name = name
        self._forward = forward
        # The first run gets the caller's own containers, since a block may append to a list. Then they are let go.
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._template = template
        self._before = before
        self._watch = watch
        self._gives_away = gives_away
        self._recomputed = False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._forward(*args, **kwargs)
        self._before.refuse_changed_weights(self._name)
        if self._recomputed and self._gives_away:
            # Not all versions of torch notice: some would go on with the outputs that are left.
            raise RuntimeError(
                f"A second backward pass went through `{self._name}`. The outputs that a `policy` keeps are given "
                'away in the first one; use `policy="full"` with `retain_graph` or double backward.',
            )
        self._recomputed = True
        with self._before.restored(), self._watch(RECOMPUTATION, None):
            return _call(self._forward, self._template, tensors)


def _call(forward: Callable[..., Any], template: Template, tensors: tuple[torch.Tensor, ...]) -> Any:
    args, kwargs = template.fill(tensors)
    return forward(*args, **kwargs)
