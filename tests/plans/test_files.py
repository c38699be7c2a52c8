"""Files are written atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plans.files import write_atomically
from plans.reading import decompressed


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    assert write_atomically(path, b"one") == path
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two" and os.listdir(path.parent) == ["a.json"]


def test_modes_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    before = os.umask(0o027)
    try:
        write_atomically(path, b"one")
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o600)
        link.symlink_to(path.name)
        write_atomically(link, b"two")
    finally:
        os.umask(before)
    assert link.is_symlink() and path.read_bytes() == b"two" and path.stat().st_mode & 0o777 == 0o600


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    write_atomically("/dev/null", b"gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path, b"x")
    assert caught.value.filename == str(tmp_path)


def test_a_gzip_file_that_holds_too_much_or_is_damaged_is_refused():
    import gzip

    packed = gzip.compress(bytes(5000))
    assert decompressed(packed, 5000) == bytes(5000)
    with pytest.raises(gzip.BadGzipFile, match="more than 4,999 bytes"):
        decompressed(packed, 4999)
    with pytest.raises(EOFError):
        decompressed(packed[:-9])
    with pytest.raises(gzip.BadGzipFile):
        decompressed(packed[:10] + b"\xff" + packed[11:])
