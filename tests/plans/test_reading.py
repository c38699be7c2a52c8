"""Files that nobody may trust: large, cut, damaged, deep, ambiguous. Each is refused in one line that names it."""

from __future__ import annotations

import contextlib
import gzip
import os
import zipfile
from decimal import Decimal

import msgspec
import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.reading import json_of, read_arrays, read_file, read_json, read_json_values, read_rows, read_toml
from tests import ROOT


class Size(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"bytes": 1, "bytes": 2}', 'key "bytes" occurs twice in one object'),
        (b'{"bytes": 1, "by\\u0074es" : 2}', 'key "bytes" occurs twice'),
        (b'{"a": {"b": "\\": {", "b": 1}}', 'key "b" occurs twice'),
        (b'{"bytes": 9223372036854775808}', "the number 9223372036854775808 is too large"),
        (b'{"bytes": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"bytes": NaN}', "not a complete JSON file"),
        (b'{"bytes": 1e999}', "a.json: "),
        (b'{"bytes": 1.5}', r"Expected `int`, got `float` - at `\$.bytes`"),
        (b'{"bytes": "1"}', "Expected `int`, got `str`"),
        (b'{"byte": 1}', "unknown key `byte`"),
        (b'{"bytes": 1', "not a complete JSON file .*; write it again"),
        (b'{"bytes": "\xff"}', "not a complete JSON file"),
        (b"[" * 100_000, "nested too deeply|not a complete JSON file"),
        (b'{"a":' * 100_000, "nested too deeply|not a complete JSON file"),
        (b"", "not a complete JSON file"),
    ],
)
def test_json_that_is_ambiguous_or_not_of_the_type_is_refused(content, says, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(TwofoldError, match=says) as caught:
        read_json(path, "the size", Size)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_json_that_is_right_is_read():
    assert json_of(b'{"bytes": 9223372036854775807}', "a", Size) == Size(2**63 - 1)
    assert json_of(b'{"a:": "x\\": ", "b": [{"a": 1}, {"a": 1e-7}], "": -3}', "a")["b"] == [{"a": 1}, {"a": 1e-7}]
    assert json_of(b"1745000000000000.123456", "a", float_hook=Decimal) == Decimal("1745000000000000.123456")


def test_json_values_that_follow_one_another_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1} [2]\n\n{"a": {"b": "}"}}3')
    assert read_json_values(path, "the trace") == [{"a": 1}, [2], {"a": {"b": "}"}}, 3]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"a": 1} {"a"', "not a complete JSON file"),
        ('{"a": 1} {"b": 1, "b": 2}', 'key "b" occurs twice'),
        ('{"a": 1} {"b": NaN}', "NaN is not a JSON number"),
        ('{"a": 1} ' + "[" * 100_000, "nested too deeply"),
        ("[9223372036854775808]", "too large"),
    ],
)
def test_json_values_are_as_strict_as_a_file_of_one(content, says, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(TwofoldError, match=f"a.json: .*{says}"):
        read_json_values(path, "the trace")


def test_unreadable_files_give_the_reason(tmp_path):
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(bytes(1 << 20)))
    with pytest.raises(TwofoldError, match=r"bomb.gz: the trace is damaged: it has more than 1,000,000 bytes"):
        read_file(bomb, "the trace", most_bytes=1_000_000)
    assert read_file(bomb, "the trace") == bytes(1 << 20)
    bomb.write_bytes(gzip.compress(bytes(1 << 20))[:-9])
    with pytest.raises(TwofoldError, match="the trace is truncated"):
        read_file(bomb, "the trace")
    with pytest.raises(TwofoldError, match="has more than 100 bytes"):
        read_file(bomb, "the trace", most_bytes=100)
    for name, says in (("none", "No such file"), ("", "Is a directory"), ("a\0b", "null")):
        with pytest.raises(TwofoldError, match=f"cannot read the trace .*{says}"):
            read_file(os.path.join(tmp_path, name), "the trace")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"bytes = nan", "bytes is nan; numbers must be finite"),
        (b"bytes = 9223372036854775808", "bytes is 9223372036854775808"),
        (b"bytes = 1\nbytes = 2", "Cannot overwrite"),
        (b"bytes = '1'", "Expected `int`"),
        (b"bytes = 1\xff", "not UTF-8 text"),
        (b"bytes = " + b"[" * 5000, "a.toml: "),
    ],
)
def test_toml_that_is_not_of_the_type_is_refused(text, says, tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(text)
    with pytest.raises(TwofoldError, match=says) as caught:
        read_toml(path, "the job", Size)
    assert str(path) in str(caught.value)


def test_damaged_arrays_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.arange(3000), b=np.ones(2))
    assert np.array_equal(read_arrays(path, "the data")["a"], np.arange(3000))
    whole, refused = path.read_bytes(), 0
    draw = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(whole)
        data[draw.integers(len(data))] ^= 1 << draw.integers(8)
        path.write_bytes(data if draw.random() < 0.8 else data[: draw.integers(len(data))])
        with contextlib.suppress(TwofoldError):  # any other error fails
            read_arrays(path, "the data")
            refused -= 1
        refused += 1
    assert refused > 100
    np.save(path.with_suffix(".npy"), np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(TwofoldError, match=r"not an \.npy file"):
        read_rows(path.with_suffix(".npy"), "the data")


def test_arrays_a_thousand_times_their_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("plans.reading._MOST_BYTES", 1 << 16)
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.npy", bytes(30 << 20))
    with pytest.raises(TwofoldError, match="a thousand times its size"):
        read_arrays(path, "the data")


def test_only_the_reader_opens_json_toml_and_arrays():
    root = ROOT
    found = [
        f"{path.relative_to(root)}: {call}"
        for package in ("plans", "costmodels", "simulator", "search", "executor", "interop", "reports", "twofold")
        for path in (root / package).rglob("*.py")
        for call in ("json.load", "json.decode(", "json.Decoder", "tomllib", "gzip.open", "GzipFile", "np.load(")
        if call in path.read_text() and path.name != "reading.py"
    ]
    assert found == [
        "reports/html.py: json.load"  # of a text that it has just made
    ]
