"""Find the repeated blocks of a model, and choose among them.

A *block* is one of several like modules that a model calls one after the other: a transformer layer, a residual block.
A *stack* is the run of blocks that belong together, such as the layers of an encoder.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from torch import nn

Selector: TypeAlias = type[nn.Module] | str

# A container whose class has less than this share of the largest one's parameters is not what fills the memory.
_WORTHWHILE = 0.05


class Block(NamedTuple):
    """One block of a model."""

    name: str
    """Path of the block in the module it was searched in, as in ``named_modules``."""
    module: nn.Module
    stack: str
    """Path of the module that holds the block and its neighbours."""


def find_blocks(module: nn.Module, blocks: Selector | Sequence[Selector] | None = None) -> list[Block]:
    """Find the blocks of ``module``, in the order of ``named_modules``.

    Args:
        module: The model, or a ``LightningModule`` that holds it.
        blocks: A class, a class name (of the module's class or of a base class), a pattern of module names in the
            syntax of :mod:`fnmatch`, or a list of these. ``None`` finds them: the layers that Hugging Face marks for
            checkpointing, else the large runs of same-class children of ``ModuleList``, ``ModuleDict`` and
            ``Sequential``, else the same-class attributes of one module that are numbered (``down1``, ``down2``).

    Returns:
        The blocks. One that lies inside another is left out, and a shared one appears once.

    Raises:
        ValueError: A selector matched nothing, or nothing was found. The message lists the candidates.
        TypeError: ``blocks`` is something else.
    """
    modules = _named_modules(module)
    if blocks is None:
        chosen = _marked_by_huggingface(modules) or _same_class_runs(modules)
        if not chosen:
            raise ValueError(
                f"No repeated blocks were found in `{type(module).__name__}`. {_advice(modules)}",
            )
    else:
        selectors = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, (str, type)) else [blocks]
        chosen = set()
        for selector in selectors:
            matched = {name for name, candidate in modules.items() if _matches(selector, name, candidate)}
            if not matched:
                shown = selector if isinstance(selector, str) else selector.__name__
                raise ValueError(
                    f"`blocks={shown!r}` matches no module of `{type(module).__name__}`. {_advice(modules)}",
                )
            chosen |= matched
        if not chosen:
            raise ValueError(f"`blocks=[]` selects nothing. {_advice(modules)}")
    return [Block(name, modules[name], _parent(name)) for name in modules if name in _outermost(modules, chosen)]


def every_nth(blocks: Sequence[Block], n: int) -> list[Block]:
    """Choose the first block of each stack and every n-th after it.

    Raises:
        ValueError: ``n`` is less than 1.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"`every_n_layers={n!r}` must be an integer; write `every_n_layers=1` to take every block.")
    if n < 1:
        raise ValueError(f"`every_n_layers={n}` must be at least 1; write `every_n_layers=1` to take every block.")
    seen: dict[str, int] = {}
    chosen = []
    for block in blocks:
        index = seen.get(block.stack, 0)
        seen[block.stack] = index + 1
        if index % n == 0:
            chosen.append(block)
    return chosen


def evenly_spaced(blocks: Sequence[Block], fraction: float) -> list[Block]:
    """Choose a fraction of the blocks, at least one, at even distances.

    Raises:
        ValueError: ``fraction`` is not in (0, 1].
        TypeError: ``fraction`` is no number.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"`fraction={fraction!r}` must be a number; write `fraction=0.5` for every second block.")
    if not 0.0 < fraction <= 1.0:
        raise ValueError(
            f"`fraction={fraction}` must be above 0 and at most 1; write `fraction=1.0` to take every block."
        )
    count = max(1, round(fraction * len(blocks))) if blocks else 0
    return [blocks[index * len(blocks) // count] for index in range(count)]


def _named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """All modules by path. A module that ``torch.compile`` wrapped stands under the path of its wrapper."""
    found = {}
    for name, candidate in module.named_modules():
        if type(candidate).__name__ != "OptimizedModule":
            path = [part for part in name.split(".") if part != "_orig_mod"]
            found[".".join(path)] = candidate
    return found


def _matches(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        matched = isinstance(module, selector)
    elif isinstance(selector, str):
        # The pattern `*` is about what is inside the model, so it must not take the model as a whole.
        by_name = name != "" and fnmatch.fnmatchcase(name, selector)
        matched = by_name or _has_class(module, selector)
    else:
        raise TypeError(
            f"`blocks` takes a module class, a class name, a pattern of module names or a list of these, not "
            f'`{selector!r}`. Write for instance `blocks="TransformerEncoderLayer"` or `blocks="model.layers.*"`.',
        )
    return matched and type(module).forward is not nn.Module.forward  # a ModuleList is never called


def _has_class(module: nn.Module, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(module).__mro__)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _outermost(modules: dict[str, nn.Module], chosen: set[str]) -> set[str]:
    """Drop stages (see `_are_stages`), then what lies inside another chosen module."""
    runs: dict[type, dict[str, list[str]]] = {}
    for name in modules:
        if name in chosen:
            runs.setdefault(type(modules[name]), {}).setdefault(_parent(name), []).append(name)
    kept = set(chosen)
    for cls, of_class in runs.items():
        holding = [
            names for names in of_class.values() if any(_inside(inner, name) for inner in chosen for name in names)
        ]
        if cls is nn.Sequential or _are_stages(modules, holding):
            kept -= {name for names in holding for name in names}
    return {name for name in kept if not any(_inside(name, other) for other in kept)}


def _inside(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))


def _are_stages(modules: dict[str, nn.Module], runs: list[list[str]]) -> bool:
    """Whether a class whose members hold blocks is that of the stages of a hierarchical model, and no block itself.

    The stages of a run differ from one another in width, in every run. (The layers of a mixture of experts hold runs
    too, of experts, but are of the same shapes.) Recomputing a whole stage at a time would save little memory.
    """
    shapes = [[tuple(parameter.shape for parameter in modules[name].parameters()) for name in names] for names in runs]
    return any(len(names) > 1 for names in runs) and all(len(set(each)) == len(each) for each in shapes)


def _marked_by_huggingface(modules: dict[str, nn.Module]) -> set[str]:
    """Layers that transformers knows how to checkpoint or keep together, by the name of their class."""
    layers = {name for name, module in modules.items() if _has_class(module, "GradientCheckpointingLayer")}
    if layers:
        return layers
    whole: set[str] = set()
    for module in modules.values():
        whole.update(getattr(module, "_no_split_modules", None) or ())
    return {
        name
        for name, module in modules.items()
        if type(module).__name__ in whole and isinstance(modules.get(_parent(name)), nn.ModuleList)
    }


def _same_class_runs(modules: dict[str, nn.Module]) -> set[str]:
    """Same-class children of containers: of the largest class, and of those that are not tiny beside it."""
    runs = _runs(modules)
    repeated = {cls for (_, cls), names in runs.items() if len(names) > 1}
    if not repeated:
        numbered = _numbered(modules)
        repeated = {cls for (_, cls), names in numbered.items() if len(names) > 1}
        runs = numbered if repeated else runs
    if not repeated:  # a model of one layer is still a model
        repeated = {cls for (stack, cls) in runs if type(modules[stack]) is nn.ModuleList}
    blocks = _outermost(modules, {name for (_, cls), names in runs.items() if cls in repeated for name in names})
    sizes: dict[str, int] = {}
    for (_, cls), names in runs.items():
        sizes[cls] = sizes.get(cls, 0) + sum(_size(modules[name]) for name in names if name in blocks)
    large = {cls for cls, size in sizes.items() if size > 0 and size >= _WORTHWHILE * max(sizes.values())}
    return {name for (_, cls), names in runs.items() if cls in large for name in names if name in blocks}


def _runs(modules: dict[str, nn.Module]) -> dict[tuple[str, str], list[str]]:
    """Names of the children of containers, by the container and the class."""
    runs: dict[tuple[str, str], list[str]] = {}
    for name, module in modules.items():
        parent = modules.get(_parent(name))
        if name and isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and _is_composite(module):
            runs.setdefault((_parent(name), _class_path(module)), []).append(name)
    return runs


def _numbered(modules: dict[str, nn.Module]) -> dict[tuple[str, str], list[str]]:
    """Runs in models without containers: same-class children whose names differ in a number, `down1`, `down2`."""
    runs: dict[tuple[str, str], list[str]] = {}
    for name, module in modules.items():
        last = name.rpartition(".")[2]
        stem = last.rstrip("0123456789")
        if stem not in (last, "") and _is_composite(module):
            runs.setdefault((_parent(name), _class_path(module)), []).append(name)
    return runs


def _is_composite(module: nn.Module) -> bool:
    """Whether a module is made of others and has parameters. A Linear or a Dropout alone is no block."""
    called = type(module).forward is not nn.Module.forward
    return called and next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not nn.parameter.is_lazy(parameter))


def _advice(modules: dict[str, nn.Module]) -> str:
    """List what could have been meant."""
    runs = _runs(modules)
    if runs:
        lines = [f"`{stack}.*`: {len(names)} x `{cls.rpartition('.')[2]}`" for (stack, cls), names in runs.items()]
    else:
        lines = [f"`{name}`: `{type(module).__name__}`" for name, module in modules.items() if "." not in name and name]
    more = f", and {len(lines) - 20} more" if len(lines) > 20 else ""
    listed = ", ".join(lines[:20]) or "none"
    return f"Candidates: {listed}{more}. Write `blocks=` with a class, a class name or a pattern of module names."
