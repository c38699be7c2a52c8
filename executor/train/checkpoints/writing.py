"""Files of checkpoints, which are hashed and brought to the disk while they are written.

The kernel of a host with much memory keeps written pages for many seconds before it begins to write them. A checkpoint
that is brought to the disk at its end only leaves the disk idle until then, and reads every byte again for its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

__all__ = ["HashedFile", "HashedFiles"]

CHUNK_BYTES = 1 << 24
"""Of data that a second thread hashes while it is written."""
SYNC_BYTES = 1 << 26
"""After how many bytes the kernel is told to write what it has."""
_BEHIND = 8
"""How many times as many bytes behind them are dropped, if they are written by then."""
_BUFFER_BYTES = 1 << 20


class HashedFile(io.FileIO):
    """A new file. When it is closed, its bytes are on the disk.

    Args:
        path: file to make.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, HashedFile(f"{folder}/part") as file:
    ...     file.write(b"abc")
    3
    >>> file.size_bytes, file.digest[:8]
    (3, 'ba80a53f')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "w")
        self._hash, self.size_bytes = hashlib.blake2b(), 0
        self._pool = ThreadPoolExecutor(1)
        self._started_bytes = 0

    @property
    def digest(self) -> str:
        """The BLAKE2 hash of what was written, in hexadecimal."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """Write all bytes of a buffer."""
        whole = memoryview(data).cast("B")
        for begin in range(0, len(whole), CHUNK_BYTES):
            part = whole[begin : begin + CHUNK_BYTES]
            if len(part) < CHUNK_BYTES:
                self._hash.update(part)
                self._write(part)
            else:
                hashing = self._pool.submit(self._hash.update, part)
                try:
                    self._write(part)
                finally:
                    hashing.result()  # the buffer is the caller's again
            self._start_writing()
        return len(whole)

    def close(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            OSError: the disk failed.
        """
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        finally:
            self._pool.shutdown()
            super().close()

    def _write(self, part: memoryview) -> None:
        done = 0
        while done < len(part):
            done += super().write(part[done:]) or 0
        self.size_bytes += done

    def _start_writing(self) -> None:
        """Let the kernel begin to write what is new, and drop what it has written.

        This neither waits nor commits the journal of the file system, for which fdatasync stops other writers.
        """
        new_bytes = self.size_bytes - self._started_bytes
        if new_bytes >= SYNC_BYTES and hasattr(os, "posix_fadvise"):  # not on macOS
            begin = max(0, self._started_bytes - _BEHIND * SYNC_BYTES)
            os.posix_fadvise(self.fileno(), begin, self.size_bytes - begin, os.POSIX_FADV_DONTNEED)
            self._started_bytes = self.size_bytes


class HashedFiles(FileSystem):
    """The file system of a torch.distributed.checkpoint writer, whose new files are `HashedFile`.

    Attributes:
        written: size and hash of every file, by name.
    """

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """As of `FileSystem`."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = HashedFile(path)
        with io.BufferedWriter(file, _BUFFER_BYTES) as stream:
            yield stream
        self.written[Path(path).name] = (file.size_bytes, file.digest)
