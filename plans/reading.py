"""Reads all files: limits of size and decompression, strict JSON and TOML, arrays. Every failure is a one-line message.

JSON and TOML are restricted to what all readers agree on. Duplicate keys are refused, because readers differ in which
one they use; so are numbers that are not finite, and whole numbers of 2^63 and more, which no size reaches.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import math
import os
import re
import tokenize
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError

__all__ = [
    "check_json", "decompressed", "json_of", "read_arrays", "read_file", "read_json", "read_json_values", "read_rows",
    "read_text", "read_toml", "text_of", "toml_of",
]  # fmt: skip

T = TypeVar("T")

_MOST_BYTES = 1 << 30
_MOST_NUMBER = 1 << 63
_GZIP = b"\x1f\x8b"
_PACKED = 1000  # deflate makes at most 1,032 bytes of one
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEY = re.compile(rb'"\s*:')
_LARGE = re.compile(rb"(?<![\d.eE+])(?<![eE]-)(\d{19,})(?![\d.eE])")
_NOT_SPACE = re.compile(r"\S")
_CHOICE = re.compile(r"Invalid enum value (.+) - at `(\$\.[^`]+)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `(.*)`)?$", re.DOTALL)
_SHOWN = 60


def read_file(path: str | os.PathLike[str], what: str, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """The bytes of a file, decompressed where it is a gzip file.

    Args:
        path: path of the file.
        what: it should be, for messages, such as "the plan file".
        most_bytes: that it may have, before and after decompression.

    Raises:
        TwofoldError: it cannot be read, is too large, or a gzip file that is cut or damaged.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise TwofoldError(f"{name}: {what} has more than {most_bytes:,} bytes; give a smaller file")
        return decompressed(content, most_bytes) if content[:2] == _GZIP else content
    except gzip.BadGzipFile as error:
        raise TwofoldError(f"{name}: {what} is damaged: {error}") from None
    except EOFError:
        raise TwofoldError(f"{name}: {what} is truncated; write it again") from None
    except OSError as error:
        raise TwofoldError(f"cannot read {what} {name!r}: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, TwofoldError):
            raise
        raise TwofoldError(f"cannot read {what} {name!r}: {error}") from None  # a name with a NUL


def decompressed(content: bytes, most_bytes: int = _MOST_BYTES) -> bytes:
    """The content of a gzip file.

    Raises:
        EOFError: the file is cut.
        gzip.BadGzipFile: it is damaged, or holds more than `most_bytes`: a small file may fill any memory.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            found = file.read(most_bytes + 1)
    except zlib.error as error:
        raise gzip.BadGzipFile(str(error)) from None
    if len(found) > most_bytes:
        raise gzip.BadGzipFile(f"it has more than {most_bytes:,} bytes; give a smaller file, or decompress it")
    return found


def text_of(content: bytes, source: str) -> str:
    """UTF-8 as text, a byte order mark left out.

    Raises:
        TwofoldError: other bytes.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TwofoldError(f"{source}: not UTF-8 text (byte {error.start + 1}); save it as UTF-8") from None


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """The text of a file, as `read_file` and `text_of`."""
    return text_of(read_file(path, what), os.fspath(path))


@overload
def json_of(content: bytes, source: str, type: type[T], *, advice: str = ..., dec_hook: Any = ...) -> T: ...
@overload
def json_of(content: bytes, source: str, *, advice: str = ..., float_hook: Any = ...) -> Any: ...
def json_of(
    content: bytes, source: str, type: Any = Any, *, advice: str = "write it again",
    dec_hook: Callable[[Any, Any], Any] | None = None, float_hook: Callable[[str], Any] | None = None,
) -> Any:  # fmt: skip
    """The value of a JSON text, of a type that is checked.

    Args:
        content: the text.
        source: its file, for messages.
        type: type of the value; any JSON where it is not given.
        advice: what to do about a file that is not whole.
        dec_hook: makes values of types that msgspec does not know.
        float_hook: makes numbers with a point, of their digits.

    Raises:
        TwofoldError: not JSON, a key twice, a number that is too large, another type (with the path in the file).

    >>> json_of(b'{"a": 1, "a": 2}', "file.json")
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: file.json: key "a" occurs twice in one object; keep one of them
    """
    try:
        check_json(content, source, msgspec.json.Decoder(float_hook=float_hook).decode(content))
        decoder = msgspec.json.Decoder(type, dec_hook=dec_hook, float_hook=float_hook)
        return decoder.decode(content)
    except TwofoldError:
        raise
    except msgspec.ValidationError as error:
        raise TwofoldError(f"{source}: {_plain(error, type)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TwofoldError(f"{source}: not a complete JSON file ({error}); {advice}") from None
    except RecursionError:
        raise TwofoldError(f"{source}: nested too deeply for a file of twofold; {advice}") from None
    except (ValueError, ArithmeticError) as error:
        raise TwofoldError(f"{source}: {str(error)[:200]}") from None


def check_json(content: bytes, source: str, decoded: Any) -> None:
    """Refuse keys that occur twice, and whole numbers of 2^63 and more.

    Args:
        content: the text; may be several values, one a line.
        source: its file, for messages.
        decoded: what the text holds.

    Raises:
        TwofoldError: such a key or number.
    """
    if b"\\u" not in content and not _LARGE.search(content):
        # Both texts have the same strings, so that as many colons are as many keys.
        if content.count(b":") == msgspec.json.encode(decoded).count(b":"):
            return
    bare = _STRING.sub(b'""', content)
    for digits in _LARGE.findall(bare):
        if len(digits) > 19 or int(digits) >= _MOST_NUMBER:
            raise TwofoldError(f"{source}: the number {digits[:_SHOWN].decode()} is too large; the most is 2^63 - 1")
    again = _STRING.sub(b'""', msgspec.json.encode(decoded))
    if len(_KEY.findall(bare)) != len(_KEY.findall(again)):
        for line in [content] if b"\n{" not in content else [content, *content.splitlines()]:
            try:
                json.loads(line, object_pairs_hook=lambda pairs: _unique(pairs, source))
            except TwofoldError:
                raise
            except ValueError:
                continue
        raise TwofoldError(f"{source}: an object has the same key twice; keep one of them")


def _unique(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TwofoldError(f"{source}: key {json.dumps(twice[:_SHOWN])} occurs twice in one object; keep one of them")
    return found


@overload
def read_json(
    path: str | os.PathLike[str], what: str, type: type[T], *, advice: str = ..., dec_hook: Any = ...
) -> T: ...
@overload
def read_json(path: str | os.PathLike[str], what: str, *, advice: str = ..., float_hook: Any = ...) -> Any: ...
def read_json(path: str | os.PathLike[str], what: str, type: Any = Any, **how: Any) -> Any:
    """The value of a JSON file, as `read_file` and `json_of`."""
    return json_of(read_file(path, what), os.fspath(path), type, **how)


def read_json_values(path: str | os.PathLike[str], what: str) -> list[Any]:
    """The JSON values that follow one another in a file, with any white space or none between them.

    Raises:
        TwofoldError: as `read_file` and `json_of`.
    """
    source = os.fspath(path)
    text = read_text(path, what)
    decoder = json.JSONDecoder(parse_constant=_not_a_number)
    values: list[Any] = []
    end = 0
    try:
        while start := _NOT_SPACE.search(text, end):
            value, end = decoder.raw_decode(text, start.start())
            check_json(text[start.start() : end].encode(), source, value)
            values.append(value)
    except TwofoldError:
        raise
    except RecursionError:
        raise TwofoldError(f"{source}: nested too deeply for a file of twofold; write it again") from None
    except ValueError as error:
        raise TwofoldError(f"{source}: not a complete JSON file ({error}); write it again") from None
    return values


def _not_a_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


@overload
def toml_of(text: str, source: str, type: type[T]) -> T: ...
@overload
def toml_of(text: str, source: str) -> dict[str, Any]: ...
def toml_of(text: str, source: str, type: Any = dict[str, Any]) -> Any:
    """The value of a TOML text, of a type that is checked.

    Raises:
        TwofoldError: not TOML, a number that is not finite or too large, a NUL character, another type (with the path
            in the file).

    >>> toml_of("a = inf", "job.toml")
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: job.toml: a is inf; numbers must be finite and below 2^63
    """
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        how = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise TwofoldError(f"{source}: not TOML ({how})") from None
    return typed(found, source, type)


def typed(tables: Mapping[str, Any], source: str, type: type[T]) -> T:
    """Tables, as of a TOML file, as a value of a type that is checked.

    Raises:
        TwofoldError: see `toml_of`.

    >>> typed({"a": 1}, "the job", dict[str, int])
    {'a': 1}
    """
    try:
        for place, value in _scalars(tables, ""):
            if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < _MOST_NUMBER):
                raise TwofoldError(f"{source}: {place} is {str(value)[:_SHOWN]}; numbers must be finite and below 2^63")
            if isinstance(value, str) and "\0" in value:
                raise TwofoldError(f"{source}: {place} has a NUL character; remove it")
        return msgspec.convert(tables, type)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        how = "nested too deeply" if isinstance(error, RecursionError) else _plain(error, type)
        raise TwofoldError(f"{source}: {how}") from None


def _plain(error: Exception, type: Any) -> str:
    """Errors of msgspec in words for people who do not know its objects, with the keys or values that are known."""
    text = str(error).replace("Object missing required field", "missing key")
    if (choice := _CHOICE.match(text)) is not None:
        value, place = choice.groups()
        return f"{place.removeprefix('$.')} is {value}; it must be {' or '.join(map(repr, _choices_at(type, place)))}"
    found = _UNKNOWN.match(text)
    if found is None:
        return text
    name, place = found.groups()
    known = _keys_at(type, place or "$")
    close = difflib.get_close_matches(name, known, 1)
    way = f"; did you mean `{close[0]}`?" if close else f"; known keys: {', '.join(known)}" if known else ""
    return f"unknown key `{name}`{f' - at `{place}`' if place else ''}{way}"


def _keys_at(type: Any, place: str) -> list[str]:
    """The keys of the object at a place such as "$.stages[0]" in a value of a type; none where it is not known."""
    return [each.encode_name for each in getattr(_type_at(type, place), "fields", ())]


def _choices_at(type: Any, place: str) -> list[Any]:
    """The values of a literal type at a place."""
    at = _type_at(type, place)
    return list(getattr(at, "values", ()))


def _type_at(type: Any, place: str) -> Any:
    """What msgspec knows of the type at a place in a value of a type; None where it is not known."""
    at: Any = msgspec.inspect.type_info(type)
    for step in (*re.findall(r"\.[^.\[]+|\[[^\]]*\]", place), ""):
        if isinstance(at, msgspec.inspect.UnionType):  # an object or nothing
            at = next((each for each in at.types if not isinstance(each, msgspec.inspect.NoneType)), None)
        if step.startswith("."):
            at = next((each.type for each in getattr(at, "fields", ()) if each.encode_name == step[1:]), None)
        elif step:
            at = getattr(at, "value_type", getattr(at, "item_type", None))
    return at


def _scalars(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _scalars(each, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _scalars(each, f"{place}[{at}]")
    else:
        yield place, value


@overload
def read_toml(path: str | os.PathLike[str], what: str, type: type[T]) -> T: ...
@overload
def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]: ...
def read_toml(path: str | os.PathLike[str], what: str, type: Any = dict[str, Any]) -> Any:
    """The value of a TOML file, as `read_file` and `toml_of`."""
    return toml_of(read_text(path, what), os.fspath(path), type)


def read_arrays(path: str | os.PathLike[str], what: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npz file; no code in it is run.

    Raises:
        TwofoldError: not such a file, or one that is a thousand times as large when it is decompressed.
    """
    name = os.fspath(path)
    try:
        if not zipfile.is_zipfile(path):
            Path(path).open("rb").close()  # says why it cannot be read
            raise TwofoldError(f"{name}: {what} is not an .npz file of arrays")
        with zipfile.ZipFile(path) as packed:
            whole = sum(each.file_size for each in packed.infolist())
        if whole > max(_MOST_BYTES, _PACKED * Path(path).stat().st_size):
            raise TwofoldError(
                f"{name}: {what} holds {whole:,} bytes, a thousand times its size; give an uncompressed file"
            )
        with warnings.catch_warnings(action="ignore"), np.load(path, allow_pickle=False) as file:
            return {each: file[each] for each in file.files}
    except TwofoldError:
        raise
    except OSError as error:
        raise TwofoldError(f"cannot read {what} {name!r}: {error.strerror or error}") from None
    except _DAMAGED as error:
        raise TwofoldError(f"{name}: {what} is not an .npz file of arrays ({str(error)[:200]})") from None


def read_rows(path: str | os.PathLike[str], what: str) -> npt.NDArray[Any]:
    """The array of a .npy file, read through memory mapping.

    Raises:
        TwofoldError: not such a file.
    """
    name = os.fspath(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # of files that Python 2 wrote
            found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(found, np.ndarray):
            raise ValueError("it has several")
        return found
    except OSError as error:
        raise TwofoldError(f"cannot read {what} {name!r}: {error.strerror or error}") from None
    except _DAMAGED as error:
        raise TwofoldError(f"{name}: {what} is not an .npy file ({str(error)[:200]})") from None


_DAMAGED = (
    ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, SyntaxError, TypeError,
    MemoryError, OverflowError, RecursionError, RuntimeError, tokenize.TokenError,
)  # fmt: skip
"""Exceptions that zipfile and numpy raise for damaged files."""
