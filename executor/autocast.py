"""`torch.autocast`, replaced by the casts that it performs.

Autocast casts the arguments of some functions according to lists inside torch. Each call is tried on tensors without
data, once with and once without autocast. Arguments that only autocast casts are then cast before the call.
`torch.export` therefore sees the casts, and a module can be run with the casts of a device that the host lacks.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from plans.errors import TwofoldError

__all__ = ["autocast_as_casts"]

_Region = tuple[str, torch.dtype] | None
"""Type of device and dtype of an autocast; None where it is off."""


@contextlib.contextmanager
def autocast_as_casts(*, only_absent: bool = False) -> Iterator[None]:
    """Within this context, an autocast makes its casts in calls of their own; `only_absent`: that of an absent device.

    Raises:
        TwofoldError: within it, a function that autocast casts in its middle.
    """
    casts = _Casts()
    begin, enter, leave = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__

    def construct(
        self: torch.autocast, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the device that is absent
            begin(self, device_type, dtype, enabled, cache_enabled)
        self._enabled = self._enabled or (enabled and _is_absent(device_type))

    def start(self: torch.autocast) -> Any:
        if only_absent and not _is_absent(self.device):
            return enter(self)
        casts.begin((self.device, self.fast_dtype) if self._enabled else None)
        return self

    def stop(self: torch.autocast, *error: Any) -> Any:
        return leave(self, *error) if only_absent and not _is_absent(self.device) else casts.end()

    with (
        mock.patch.object(torch.autocast, "__init__", construct),
        mock.patch.object(torch.autocast, "__enter__", start),
        mock.patch.object(torch.autocast, "__exit__", stop),
    ):
        yield


def _is_absent(device_type: str) -> bool:
    module = getattr(torch, device_type, None)
    return device_type not in ("cpu", "meta") and not (module is not None and module.is_available())


@dataclass(frozen=True, slots=True)
class _Cast:
    """How an argument, or a view of it, is cast."""

    dtype: torch.dtype
    is_of_a_view: bool


class _Casts(TorchFunctionMode):
    """Casts the arguments of functions as the innermost autocast does."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[_Region] = []
        self.weights: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # each is cast once, as torch does
        self.known: dict[object, Mapping[int, _Cast] | None] = {}
        self.functions_in_parts = contextlib.ExitStack()

    def begin(self, region: _Region) -> None:
        """Enter an autocast."""
        if not self.regions:
            self.functions_in_parts.enter_context(_functions_in_parts())
            self.__enter__()
        self.regions.append(region)

    def end(self) -> None:
        """Leave the innermost autocast."""
        self.regions.pop()
        if not self.regions:
            self.__exit__(None, None, None)
            self.functions_in_parts.close()
            self.weights.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        region, kwargs = self.regions[-1], kwargs or {}
        if region is None or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, dict(kwargs)))
        wanted = self._casts(func, leaves, structure, region)
        if wanted is None:
            parts = _cross_entropy(*args, **kwargs) if func is torch._C._nn.cross_entropy_loss else None
            if parts is None:
                raise TwofoldError(
                    f"torch.autocast casts in the middle of {getattr(func, '__name__', func)}, which a graph cannot "
                    "represent; call it under torch.autocast(..., enabled=False), on values that already have the "
                    "target dtype"
                )
            with self:
                return parts()
        cast = [self._cast(leaf, wanted[at], region) if at in wanted else leaf for at, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(cast, structure)
        return func(*args, **kwargs)

    def _casts(
        self, func: Callable[..., Any], leaves: Sequence[Any], structure: TreeSpec, region: tuple[str, torch.dtype]
    ) -> Mapping[int, _Cast] | None:
        """Number of an argument -> how autocast casts it; None where it casts in the middle."""
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
            return {}
        key = (func, region, str(structure), *(_seen(leaf) for leaf in leaves))
        if key not in self.known:
            self.known[key] = _found(func, leaves, structure, region)
        return self.known[key]

    def _cast(self, tensor: Tensor, cast: _Cast, region: tuple[str, torch.dtype]) -> Tensor:
        dtype = cast.dtype
        is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf
        if not is_weight or dtype != region[1] or cast.is_of_a_view:
            return tensor.to(dtype)
        if (id(tensor), dtype) not in self.weights:
            self.weights[id(tensor), dtype] = (tensor, tensor.to(dtype))
        return self.weights[id(tensor), dtype][1]


@contextlib.contextmanager
def _functions_in_parts() -> Iterator[None]:
    """Within this context, functions that torch writes in Python are seen as the calls that they make."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    with contextlib.ExitStack() as stack:
        for module in (torch.nn.functional, torch.functional, torch._tensor):
            for name in checks:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=False))
        yield


def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Callable[[], Tensor] | None:  # fmt: skip
    """A cross entropy of class numbers in its two parts, which autocast casts apart."""
    if label_smoothing or target.is_floating_point():
        return None
    dim, name = min(1, x.dim() - 1), ("none", "mean", "sum")[reduction]
    return lambda: F.nll_loss(F.log_softmax(x, dim), target, weight, ignore_index=ignore_index, reduction=name)


# -- trying a call -----------------------------------------------------------------------------------------------------


def _seen(leaf: Any) -> object:
    """The properties of an argument on which the casts of a call may depend."""
    return (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else (type(leaf), str(leaf))


def _found(
    func: Callable[..., Any], leaves: Sequence[Any], structure: TreeSpec, region: tuple[str, torch.dtype]
) -> Mapping[int, _Cast] | None:
    dtypes = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(), _without_log():
        plain, cast = (_tried(func, leaves, dtypes, structure, region, is_on) for is_on in (False, True))
        casts = {at: wanted for at, wanted in cast.casts.items() if plain.casts.get(at) != wanted}
        wide = {  # autocast passes a dtype to a sum in place of a cast
            at: _Cast(dtype=torch.float32, is_of_a_view=True) for at, dtype in enumerate(dtypes) if dtype == region[1]
        }
        all_casts = cast.casts, cast.count - len(cast.casts)  # also those that a call makes itself
        for found, count in ((casts, cast.count - len(casts)), all_casts, (wide, cast.count)):
            after = [found[at].dtype if at in found else dtype for at, dtype in enumerate(dtypes)]
            before = _tried(func, leaves, after, structure, region, is_on=False)
            if (before.count, before.made) == (count, cast.made):
                return found
    return None


def _tried(
    func: Callable[..., Any], leaves: Sequence[Any], dtypes: Sequence[torch.dtype | None], structure: TreeSpec,
    region: tuple[str, torch.dtype], is_on: bool,
) -> _Noting:  # fmt: skip
    """A call of tensors without data in some dtypes, under autocast or not."""
    with FakeTensorMode(), _autocast(*region, is_on):
        empty = [
            leaf if dtype is None else torch.empty(leaf.shape, dtype=dtype, device=region[0])
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        args, kwargs = tree_unflatten(empty, structure)
        noting = _Noting(empty)
        with contextlib.suppress(Exception), noting:  # a call may need the values, or equal dtypes
            made = func(*args, **kwargs)
            noting.made = [each.dtype for each in tree_flatten(made)[0] if isinstance(each, Tensor)]
    return noting


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Within this context, torch neither logs calls that fail nor warns."""
    with (
        mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _autocast(device: str, dtype: torch.dtype, is_on: bool) -> Iterator[None]:
    """Autocast for a type of device that may be absent."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, is_on)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


class _Noting(TorchDispatchMode):
    """Notes the first cast of each argument of a call, or of a view of it, the number of all casts, and the results."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        super().__init__()
        tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.places = {leaf.untyped_storage()._cdata: at for at, leaf in reversed(tensors)}
        self.leaves = leaves
        self.casts: dict[int, _Cast] = {}
        self.count = 0
        self.made: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (dtype := (kwargs or {}).get("dtype")) is not None:
            self.count += 1
            at = self.places.get(args[0].untyped_storage()._cdata)
            if at is not None:
                self.casts.setdefault(at, _Cast(dtype=dtype, is_of_a_view=args[0] is not self.leaves[at]))
        return func(*args, **(kwargs or {}))
