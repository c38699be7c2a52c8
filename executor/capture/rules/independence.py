"""The named dims of an operator without a declaration, found by experiment.

A dim can be split if half of the inputs determines half of the output. This is tested: if one half of an input along a
dim changes, only the same half of the output along some dim may change. The operator is then run on both halves, and
their results must equal those of the full input. Inputs without the dim are not split; their gradient is a sum over the
parts. The test runs on two sets of random numbers: between 0 and 1, and of both signs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor

from executor.kernels.programs import aten_call, program
from plans.reading import json_of

__all__ = ["Call", "Read", "dims_of", "samples_meet"]

_MOST_TRIED = 2**22
"""Elements; larger operators are tried out in smaller sizes, or not at all."""

_QUICK = 2**13
"""Elements above which an operator is tried out in smaller sizes if it can be: a trial runs it about twenty times."""

_SMALL = 8
"""Sizes that do not change in smaller trials; whole numbers among the arguments up to it are taken for no sizes."""

_SAMPLES = 4
"""Samples of the batch that is tried."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A tensor that a call reads; `batch` is the dim that is the batch, None where there is none."""

    shape: tuple[int, ...]
    dtype: str
    batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of aten, or a program, and its inputs.

    Args:
        target, arguments: as `executor.kernels.programs.aten_call` takes them; without a target `arguments` is the text
            of a `program`.
        inputs: the tensors, in the order in which the arguments count them.
    """

    target: str
    arguments: str
    inputs: tuple[Read, ...]


def dims_of(
    call: Call, which: int, shape: tuple[int, ...], backward: str = "", place: int | None = None
) -> str:  # fmt: skip
    """The dims of inputs and output `which` (-1: the only one), as "ab,b->ab".

    With a `backward`, a program that makes gradients of the inputs from that of the output and the inputs, only dims
    are split along which the parts of the gradients are those of the whole: their sum, for inputs without the dim.

    `place` is the dim of the output that is the batch; that of the first input that has one unless it is given.
    A small letter is a dim that can be split. A capital letter is the batch where that is not known. A dim with a dot
    is whole and no other's.

    >>> read = Read(shape=(8, 6), dtype="float32", batch=0)
    >>> dims_of(Call(target="aten.cumsum.default", arguments='[[{"tensor": 0}, 1], {}]', inputs=(read,)), -1, (8, 6))
    'a.->a.'
    """
    inputs = [["."] * len(read.shape) for read in call.inputs]
    output = ["."] * len(shape)
    links = _links(_shrunk(call), which, backward)
    for letter, (at, ends) in zip(ascii_lowercase, links or (), strict=False):
        output[at] = letter
        for index, dim in ends:
            inputs[index][dim] = letter
    batched = [(at, read.batch) for at, read in enumerate(call.inputs) if read.batch is not None]
    place = place if place is not None else batched[0][1] if batched else 0
    shared = [(at, own) for at, own in batched if place < len(shape) and call.inputs[at].shape[own] == shape[place]]
    if shared and output[place] == ".":
        output[place] = "A"
        for at, own in shared:
            if inputs[at][own] == ".":
                inputs[at][own] = "A"
    return f"{','.join(map(''.join, inputs))}->{''.join(output)}"


def samples_meet(call: Call, places: Sequence[int | None] = ()) -> bool:
    """Whether other samples' results change when the first or the last one does, as far as random numbers show.

    Args:
        call: what is tried.
        places: the dim of each result that is the batch, or holds it as its outer factor; None, or missing, where that
            is not known: then that of the first input that has one.
    """
    return _samples_meet(_shrunk(call), tuple(places))


def _shrunk(call: Call) -> Call:
    """The same call for a small batch, with small sizes if the tensors are still large; unchanged if its arguments
    contain sizes.
    """
    small = _with_shapes(
        call, [tuple(min(size, _SAMPLES) if at == read.batch else size for at, size in enumerate(read.shape))
               for read in call.inputs]
    )  # fmt: skip
    smaller = _in_small_sizes(small) if _num_elements(small) > _QUICK else None
    if smaller is not None and _can_be_tried(smaller):
        return smaller
    return small if small == call or _can_be_tried(small) else call


def _in_small_sizes(call: Call) -> Call | None:
    """The call with other sizes, equal ones for equal ones; None where an argument is a size or a position.

    They are larger than small numbers among the arguments and divide no other, so that a roll by such a number still
    moves elements.
    """
    numbers = {abs(number) for number in _whole_numbers(json_of(call.arguments.encode(), "arguments"))}
    stated = [number for number in numbers if number > _SMALL]
    sizes = sorted({size for read in call.inputs for size in read.shape})
    free = (
        size for size in range(_SMALL + 2, 1000, 2)
        if size not in sizes and all(number % size for number in stated)
    )  # fmt: skip
    instead = {size: size if size <= _SMALL else next(free) for size in sizes}
    smaller = _with_shapes(call, [tuple(instead[size] for size in read.shape) for read in call.inputs])
    if stated:
        before, after = _result_shapes(call), _result_shapes(smaller)
        if before is None or after != [tuple(instead.get(size, size) for size in shape) for shape in before]:
            return None
    return smaller


def _result_shapes(call: Call) -> list[tuple[int, ...]] | None:
    """The shapes of the results, without computing them; None if the call does not accept these sizes."""
    inputs = [torch.empty(read.shape, dtype=getattr(torch, read.dtype), device="meta") for read in call.inputs]
    made = _results(call, inputs, torch.device("meta"))
    return None if made is None else [tuple(result.shape) for result in made]


def _whole_numbers(argument: Any) -> Iterator[int]:
    if isinstance(argument, int):
        yield argument
    elif isinstance(argument, list):
        for each in argument:
            yield from _whole_numbers(each)
    elif isinstance(argument, dict):
        for key, each in argument.items():
            if key not in ("tensor", "results"):
                yield from _whole_numbers(each)


def _with_shapes(call: Call, shapes: Sequence[tuple[int, ...]]) -> Call:
    return replace(
        call, inputs=tuple(replace(read, shape=shape) for read, shape in zip(call.inputs, shapes, strict=True))
    )


def _num_elements(call: Call) -> int:
    return sum(math.prod(read.shape) for read in call.inputs)


def _can_be_tried(call: Call) -> bool:
    return any(_results(call, inputs) is not None for inputs in itertools.islice(_draws(call), 1))


def _draws(call: Call) -> Iterator[list[Tensor]]:
    """Random inputs for a call: floating point in double precision, integers 0 or 1. A call that is too large to try
    yields nothing."""
    if _num_elements(call) > _MOST_TRIED:
        return
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)

        def numbers(read: Read, seed: int = seed, generator: torch.Generator = generator) -> Tensor:
            if not read.dtype.startswith(("float", "bfloat")):
                return (torch.rand(read.shape, generator=generator) < 0.5).to(getattr(torch, read.dtype))
            draw = torch.randn if seed else torch.rand
            made = draw(read.shape, generator=generator, dtype=torch.float64)
            return made if seed else made * 0.9 + 0.05

        yield [numbers(read) for read in call.inputs]


def _results(call: Call, inputs: Sequence[Tensor], device: torch.device = _CPU) -> tuple[Tensor, ...] | None:
    """The result of the call; None if it does not accept other numbers or sizes."""
    try:
        with torch.no_grad():
            run = aten_call(call.target, call.arguments) if call.target else program(call.arguments)
            made = run(device, *inputs)
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return None
    results = made if isinstance(made, tuple | list) else (made,)
    return tuple(
        torch.zeros(()) if result is None else torch.view_as_real(result) if result.is_complex() else result
        for result in results
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _samples_meet(call: Call, known: tuple[int | None, ...]) -> bool:
    places = [read.batch for read in call.inputs if read.batch is not None]
    draws = list(_draws(call)) if places else []
    if not draws:
        return False
    drawn, other = draws
    bases = [drawn]
    if any(not tensor.is_floating_point() for tensor in drawn):
        # all samples read what is at place 0: that is the first sample if whole numbers are places among samples
        bases.append([tensor if tensor.is_floating_point() else torch.zeros_like(tensor) for tensor in drawn])
    return any(_meet(call, known, base, other, places[0]) for base in bases)


def _meet(
    call: Call, known: tuple[int | None, ...], drawn: Sequence[Tensor], other: Sequence[Tensor], place: int
) -> bool:  # fmt: skip
    """Whether results of other samples change if the first or last sample of `drawn` becomes that of `other`."""
    before = _results(call, drawn)
    samples = next(read.shape[read.batch] for read in call.inputs if read.batch is not None)
    for changed, start in ((0, 1), (-1, 0)):
        altered = [tensor.clone() for tensor in drawn]
        for tensor, fresh, read in zip(altered, other, call.inputs, strict=True):
            if read.batch is not None:
                sample = tensor.select(read.batch, changed)
                sample.copy_(~sample if tensor.dtype == torch.bool else fresh.select(read.batch, changed))
        after = _results(call, altered)
        if before is None or after is None:
            return False  # made for other numbers than random ones
        for which, (one, two) in enumerate(zip(before, after, strict=True)):
            if not one.dim() or not one.numel():
                continue
            at = known[which] if which < len(known) else None
            at = at if at is not None else place if one.dim() > place else 0
            own = max(1, one.shape[at] // samples)
            if not _equal(*(tensor.narrow(at, start * own, one.shape[at] - own) for tensor in (one, two))):
                return True
    return False


Ends = tuple[tuple[int, int], ...]
"""(input, dim) pairs that are split together."""


@lru_cache(maxsize=1024)
def _links(call: Call, which: int, backward: str) -> tuple[tuple[int, Ends], ...] | None:
    """(dim of the output, dims of the inputs) that can be split, one by one and all at once."""
    draws = [(inputs, made) for inputs in _draws(call) if (made := _results(call, inputs)) is not None]
    if not draws or not all(isinstance(tensor, Tensor) for tensor in draws[0][1]):
        return None
    shape = draws[0][1][which].shape
    found: list[tuple[int, Ends]] = []
    taken: set[tuple[int, int]] = set()
    pointwise = _is_pointwise(call)
    of_backward = _unread(call, draws, which) if backward else ()
    for at, size in enumerate(shape):
        if size < 2:
            continue
        ends: list[tuple[int, int]] = []
        for index, read in enumerate(call.inputs):
            for dim, own in enumerate(read.shape):
                if own != size or (index, dim) in taken:
                    continue
                is_aligned = dim - len(read.shape) == at - len(shape)
                if index in of_backward:
                    follows = dim == at
                else:
                    follows = is_aligned if pointwise else _follows(call, draws, which, at, index, dim)
                if follows:
                    ends.append((index, dim))
                    break
        link = (at, tuple(ends))
        if (
            ends
            and all(_in_halves(call, *draw, which, [*found, link]) for draw in draws)
            and (not backward or all(_gradients_in_halves(backward, *draw, which, [*found, link]) for draw in draws))
        ):
            found.append(link)
            taken.update(ends)
    return tuple(found)


def _unread(call: Call, draws: Sequence[Draw], which: int) -> list[int]:
    """The inputs that result `which` does not depend on: a backward may read them."""

    def changes(index: int) -> bool:
        fresh = [draws[at - 1][0][index] for at in range(len(draws))]
        altered = [[*inputs[:index], new, *inputs[index + 1 :]] for (inputs, _), new in zip(draws, fresh, strict=True)]
        results = [_results(call, inputs) for inputs in altered]
        return any(
            after is None or not _equal(made[which], after[which])
            for (_, made), after in zip(draws, results, strict=True)
        )

    return [index for index in range(len(call.inputs)) if not changes(index)]


def _is_pointwise(call: Call) -> bool:
    """Whether torch says that an operator works element by element; random numbers may not show it: floor, clamp."""
    if not call.target or '"complex"' in call.arguments:  # whose real form has one more dim than a real result
        return False
    _, name, overload = call.target.split(".")
    return torch.Tag.pointwise in getattr(getattr(torch.ops.aten, name), overload).tags


Draw = tuple[list[Tensor], tuple[Tensor, ...]]


def _follows(call: Call, draws: Sequence[Draw], which: int, at: int, index: int, dim: int) -> bool:
    """Whether each half of an input along `dim` changes the same half of the output along `at`, and no other."""
    changes = False
    for inputs, made in draws:
        size = made[which].shape[at]
        for half in (range(size // 2), range(size // 2, size)):
            altered = [tensor.clone() for tensor in inputs]
            part = altered[index].narrow(dim, half.start, len(half))
            part.copy_(1 - part.to(torch.int64) if not part.is_floating_point() else part.flip(dim) * 0.5 + 0.2)
            after = _results(call, altered)
            if after is None:
                return False
            rest = range(size // 2, size) if half.start == 0 else range(size // 2)
            if not _equal(*(each[which].narrow(at, rest.start, len(rest)) for each in (made, after))):
                return False
            changes = changes or not _equal(made[which], after[which])
    return changes


def _in_halves(
    call: Call, inputs: Sequence[Tensor], made: tuple[Tensor, ...], which: int, links: Sequence[tuple[int, Ends]]
) -> bool:
    """Whether halves of the inputs give halves of the output: along the last link alone, and along all at once."""
    for chosen in ([links[-1]], links):
        for second in (False, True):
            parts, expected = list(inputs), made[which]
            for at, ends in chosen:
                size = made[which].shape[at]
                half = (size // 2, size - size // 2) if second else (0, size // 2)
                expected = expected.narrow(at, *half)
                for index, dim in ends:
                    parts[index] = parts[index].narrow(dim, *half)
            found = _results(call, [part.contiguous() for part in parts])
            if found is None or found[which].shape != expected.shape:
                return False
            if not _is_close(found[which], expected):
                return False
    return True


def _gradients_in_halves(
    backward: str, inputs: Sequence[Tensor], made: tuple[Tensor, ...], which: int, links: Sequence[tuple[int, Ends]]
) -> bool:
    """Whether gradients computed from halves equal the full gradients: along the last link alone, and along all at
    once.
    """
    g = torch.randn(made[which].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    run = program(backward)
    try:
        whole = run(g.device, g, *inputs)
        for chosen in ([links[-1]], links):
            summed = [None if each is None else torch.zeros_like(each) for each in whole]
            for halves in itertools.product((False, True), repeat=len(chosen)):
                parts, of_g, places = list(inputs), g, list(summed)
                for (at, ends), second in zip(chosen, halves, strict=True):
                    size = g.shape[at]
                    half = (size // 2, size - size // 2) if second else (0, size // 2)
                    of_g = of_g.narrow(at, *half)
                    for index, dim in ends:
                        parts[index] = parts[index].narrow(dim, *half)
                        place = places[index]
                        places[index] = None if place is None else place.narrow(dim, *half)
                for place, part in zip(places, run(g.device, of_g, *parts), strict=True):
                    if place is not None:
                        place += part
            pairs = [(one, two) for one, two in zip(summed, whole, strict=True) if one is not None]
            if not all(_is_close(one, two) for one, two in pairs):
                return False
    except (RuntimeError, IndexError, ValueError):  # sizes that the backward does not take
        return False
    return True


def _is_close(one: Tensor, two: Tensor) -> bool:
    if torch.equal(one, two):
        return True
    return torch.allclose(one.double(), two.double(), rtol=1e-9, atol=1e-12, equal_nan=True)


def _equal(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), two.nan_to_num())
