"""Initial values of parameters, created late and one at a time, equal on every rank and for every plan.

The rule: **twofold's seed decides.** The values of a parameter follow from `set_seed` (or the `seed` argument) and
from its name alone; other parameters, ranks, layouts, and the order of calls have no influence. It is initialised by

1. its present value, if it has one: built outside of `no_init_parameters`, or loaded from a checkpoint;
2. else what building the module inside `no_init_parameters` would have written into it: `torch.nn.init` calls,
   `reset_parameters`, `initializer`, arithmetic on them;
3. else, for a module that was built under `torch.device("meta")` only, its owner's `reset_parameters`.

`initialise(module, overwrite=True)` gives a module that holds values those of rule 3: the same that it would have had
from `no_init_parameters`. The attribute `_backbone` of wrappers such as `WithLossCell` does not count in a name, so a
network has the same values with and without its loss.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar
from unittest import mock

import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from executor.weights.initial_recording import Recorded, Recording
from plans.errors import TwofoldError

__all__ = [
    "as_array",
    "get_seed",
    "initial_parameter",
    "initialise",
    "initialised_copy",
    "initializer",
    "no_init_parameters",
    "set_seed",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_RECORDED = "_twofold_initial"  # attribute of a tensor: its `Recorded`
_RESETS = ("reset_parameters", "_reset_parameters")
_INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    # Deviations and ranges are MindSpore's: Normal(sigma=0.01), Uniform(scale=0.07), TruncatedNormal(sigma=0.01).
    "normal": lambda tensor: nn.init.normal_(tensor, std=0.01),
    "uniform": lambda tensor: nn.init.uniform_(tensor, -0.07, 0.07),
    "truncatedNormal": lambda tensor: nn.init.trunc_normal_(tensor, std=0.01, a=-0.02, b=0.02),
    "xavier_uniform": nn.init.xavier_uniform_,
    "he_uniform": nn.init.kaiming_uniform_,
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
}

_seed = 0
_recording_in: set[int] = set()  # threads inside of no_init_parameters


def set_seed(seed: int) -> None:
    """Set the seed of all initial values, and torch's own generator for modules that are built with values.

    Raises:
        TwofoldError: not an int of at least 0.

    >>> set_seed(1)  # doctest: +SKIP
    """
    global _seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise TwofoldError(f"the seed is {seed!r}; it must be an int from 0 to 2**63 - 1")
    _seed = seed
    torch.manual_seed(seed)


def get_seed() -> int:
    """The seed that `set_seed` set; 0 before."""
    return _seed


@contextlib.contextmanager
def no_init_parameters() -> Iterator[None]:
    """Context in which modules get parameters without data (on the meta device) and record their initialisation.

    >>> with no_init_parameters():
    ...     net = nn.Linear(3, 2)
    >>> net.weight.is_meta, initialise(net, seed=1).weight.is_meta
    (True, False)
    """
    thread = threading.get_ident()
    if thread in _recording_in:
        yield
        return
    recording = Recording()
    built: list[torch.Tensor] = []

    def remember(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.is_meta and threading.get_ident() == thread:
            setattr(tensor, _RECORDED, recording.of(tensor))
            built.append(tensor)

    hooks = [
        torch_module.register_module_parameter_registration_hook(remember),
        torch_module.register_module_buffer_registration_hook(remember),
    ]
    _recording_in.add(thread)
    try:
        with recording, torch.device("meta"):
            yield
    finally:
        _recording_in.discard(thread)
        for hook in hooks:
            hook.remove()
        for tensor in built:
            getattr(tensor, _RECORDED).version = tensor._version


def initializer(
    init: str | Callable[[torch.Tensor], Any], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """Make a parameter initialised by `init`; inside `no_init_parameters` it has no data.

    Args:
        init: a name ("normal", "uniform", "truncatedNormal", "xavier_uniform", "he_uniform", "zeros", "ones"; normal is
            N(0, 0.01^2) as in MindSpore) or a function that fills a tensor in place.
        shape: shape of the parameter.
        dtype: dtype of the parameter.

    Raises:
        TwofoldError: a name that is not known.

    >>> initializer("zeros", [2, 2]).shape
    torch.Size([2, 2])
    """
    fill = _INITIALIZERS.get(init) if isinstance(init, str) else init
    if fill is None:
        raise TwofoldError(f"initializer {init!r} is not known; known: {', '.join(_INITIALIZERS)}")
    parameter = nn.Parameter(torch.empty(tuple(shape), dtype=dtype))
    with torch.no_grad():
        fill(parameter)
    return parameter


def initial_parameter(module: nn.Module, name: str, seed: int | None = None) -> torch.Tensor:
    """The full initial value of one parameter or buffer, on the CPU. The module is not changed.

    Args:
        module: that has it.
        name: as in the state dict.
        seed: the one of `set_seed` by default; not used where the parameter has a value already.

    Raises:
        TwofoldError: no such parameter, or nothing says how it is initialised.

    >>> with no_init_parameters():
    ...     net = nn.Linear(3, 2)
    >>> torch.equal(initial_parameter(net, "bias", seed=1), initial_parameter(net, "bias", seed=1))
    True
    """
    name = _first_name(module, name)
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor = getattr(owner, leaf)
    if not tensor.is_meta:
        return tensor.detach().to("cpu", copy=True)
    return _made(owner, leaf, name, _seed if seed is None else seed)


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values of a tensor: complex numbers as [.., 2], bfloat16, which numpy lacks, as float32.

    >>> as_array(torch.tensor([1 + 2j])).tolist(), as_array(torch.ones(2, dtype=torch.bfloat16)).tolist()
    ([[1.0, 2.0]], [1.0, 1.0])
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def initialise(module: ModuleT, seed: int | None = None, *, overwrite: bool = False) -> ModuleT:
    """Give every parameter and buffer without data its initial value, in place; returns `module`.

    The tensors stay the same objects, so an optimizer made before sees the values.

    Args:
        module: tied parameters stay tied.
        seed: the one of `set_seed` by default.
        overwrite: initialise parameters that have values as well, by their owners' `reset_parameters`.

    Raises:
        TwofoldError: the initialisation of one of them is unknown.
    """
    seed = _seed if seed is None else seed
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        path, _, leaf = name.rpartition(".")
        if tensor.is_meta:
            value: torch.Tensor = _made(module.get_submodule(path), leaf, name, seed)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, value)
        elif overwrite and isinstance(tensor, nn.Parameter):
            with torch.no_grad():
                tensor.copy_(_made(module.get_submodule(path), leaf, name, seed))
    return module


def initialised_copy(module: ModuleT, seed: int | None = None) -> ModuleT:
    """A copy of `module` on the CPU with initial values everywhere; `module` stays unchanged."""
    held: dict[int, Any] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = initial_parameter(module, name, seed)
        is_parameter = isinstance(tensor, nn.Parameter)
        held[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    for kept in pytree.tree_leaves([vars(part) for part in module.modules()]):
        if isinstance(kept, torch.Tensor) and not kept.is_leaf:  # which torch does not copy
            held[id(kept)] = kept.detach().clone()
    with mock.patch.dict(copy._deepcopy_dispatch, {FunctionType: _copied_function}):  # type: ignore[attr-defined]
        return copy.deepcopy(module, held)


def _copied_function(function: FunctionType, copied: dict[int, Any]) -> FunctionType:
    """A function that a module keeps, with copies of the modules and tensors that it reads from around it.

    `copy.deepcopy` returns the function itself, which goes on computing with the original's layers.
    """
    contents = [_content(cell) for cell in function.__closure__ or ()]
    of_module = [isinstance(each, _WITH_MODULES) or id(each) in copied for each in contents]
    if not any(of_module):
        return function
    cells = tuple(CellType() for _ in contents)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    copied[id(function)] = made  # first, for a function that calls itself
    for cell, content, is_copied in zip(cells, contents, of_module, strict=True):
        if content is not _EMPTY:
            cell.cell_contents = copy.deepcopy(content, copied) if is_copied else content
    return made


_WITH_MODULES = (nn.Module, FunctionType, MethodType)
_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never set
        return _EMPTY


def _first_name(module: nn.Module, name: str) -> str:
    """The name that determines the values: the first name of a tied parameter."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {path: first.setdefault(id(tensor), path) for path, tensor in named}
    if name not in names:
        raise TwofoldError(f"{type(module).__name__} has no parameter {name!r}; it has {', '.join(names) or 'none'}")
    return names[name]


def _made(owner: nn.Module, leaf: str, name: str, seed: int) -> torch.Tensor:
    tensor = getattr(owner, leaf)
    recorded: Recorded | None = getattr(tensor, _RECORDED, None)
    if recorded is not None and recorded.version != tensor._version:
        raise TwofoldError(
            f"the parameter {name!r} was written to after no_init_parameters() ended, when it had no data; "
            f"initialise it inside of no_init_parameters()"
        )
    for way in (lambda: recorded, lambda: _reset(owner, leaf)):
        if (found := way()) is not None:
            value = found.values(_seed_of(name, seed))
            if not (value.is_floating_point() and value.isnan().any()):
                return value.to(tensor.dtype)
    raise TwofoldError(
        f"the parameter {name!r} of {type(owner).__name__} has no initialisation: build it inside "
        f"no_init_parameters() with torch.nn.init or initializer(...), or give {type(owner).__name__} a method "
        f"reset_parameters"
    )


def _reset(owner: nn.Module, leaf: str) -> Recorded | None:
    """How the owner's `reset_parameters` initialises one of its tensors."""
    reset = next((name for name in _RESETS if callable(getattr(owner, name, None))), None)
    if reset is None:
        return None
    recording = Recording()
    with recording, torch.device("meta"):
        stand_in = _empty_copy(owner)
        getattr(stand_in, reset)()
    return recording.of(getattr(stand_in, leaf))


def _empty_copy(module: nn.Module) -> nn.Module:
    """A copy with separate tensors without data, including its submodules, because a reset may write to them."""
    made = copy.copy(module)
    parts: dict[str, dict[str, Any]] = {
        "_parameters": {
            name: tensor if tensor is None else nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype))
            for name, tensor in module._parameters.items()
        },
        "_buffers": {
            name: tensor if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in module._buffers.items()
        },
        "_modules": {name: part if part is None else _empty_copy(part) for name, part in module._modules.items()},
    }
    for held, values in parts.items():
        object.__setattr__(made, held, values)
    return made


def _seed_of(name: str, seed: int) -> int:
    """63 bits of a hash of the name and the seed, the same in every process."""
    text = f"{seed}:{name.replace('_backbone.', '')}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
