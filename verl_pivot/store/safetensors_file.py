"""Safetensors files, written tensor by tensor.

The format is 8 bytes of header length, a JSON header that may be padded with blanks, then the tensors without
gaps (https://github.com/huggingface/safetensors, README, "Format"). Reserving a header of fixed size lets tensors go
straight from their own memory into the tmpfs as they come: no second copy of a shard is ever held, and the caller may
reuse a tensor's memory as soon as ``append`` has returned. Data begins on a page boundary.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_pivot.store.capacity import Room
from verl_pivot.store.errors import StoreCorrupt

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 256 * 1024
"""Reserved at the head of each file: room for some 2000 tensors."""
EDGE_BYTES = 1024 * 1024
_ALIGNMENT = 8
_METADATA = {"format": "pt"}  # Hugging Face loaders refuse files that do not say who wrote them.

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Safetensors' name of the tensor's dtype. Raises TypeError for dtypes that the format cannot hold."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"tensor {name!r} has dtype {dtype}; the parameter store holds {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def host_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order; copies only what is not already contiguous host memory."""
    import torch

    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"tensor {name!r} is sharded ({type(tensor).__name__}): publish its full_tensor()")
    host = tensor.detach().to("cpu").contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data


class ShardFile:
    """A safetensors file being written. ``append`` any number of times, then ``finish`` or ``close``."""

    def __init__(self, path: Path, room: Room) -> None:
        self.path = path
        self._room = room
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._end = HEADER_BYTES
        # What the header holds, and a bound on its size.
        self._header: dict[str, dict[str, Any]] = {}
        self._header_bytes = len(json.dumps({"__metadata__": _METADATA})) + 8
        self._odd: list[tuple[int, str, dict[str, Any], bytes]] = []
        self.data_bytes = 0
        """Bytes of the tensors appended so far."""

    def accepts(self, name: str, tensor: torch.Tensor, limit_bytes: int) -> bool:
        """Whether the tensor fits: in the header, and into a file of ``limit_bytes`` unless it would be alone."""
        if self._header_bytes + _entry_bytes(name, tensor) > HEADER_BYTES:
            return False
        # Alone, a tensor fits whatever its size.
        size = HEADER_BYTES + self.data_bytes + tensor.numel() * tensor.element_size()
        return self.data_bytes == 0 or size <= limit_bytes

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Raises StoreFull, or TypeError for a tensor that cannot be stored."""
        entry: dict[str, Any] = {"dtype": dtype_name(name, tensor), "shape": list(tensor.shape)}
        data = host_bytes(name, tensor)
        self.data_bytes += len(data)
        self._header_bytes += _entry_bytes(name, tensor)
        if len(data) % _ALIGNMENT:
            # It would misalign its successors, so it waits for the end of the file: such tensors are few and small.
            self._odd.append((tensor.element_size(), name, entry, bytes(data)))
        else:
            self._write(name, entry, data)

    def finish(self) -> tuple[int, int]:
        """Writes what waits and the header; returns (file bytes, edge CRC-32)."""
        for _, name, entry, data in sorted(self._odd, key=lambda odd: -odd[0]):
            self._write(name, entry, memoryview(data))
        self._odd.clear()
        head = json.dumps({"__metadata__": _METADATA, **self._header}, separators=(",", ":")).encode()
        length = HEADER_BYTES - 8
        with self._room.taking(HEADER_BYTES):
            _write_all(self._fd, memoryview(struct.pack("<Q", length) + head.ljust(length)), 0)
        checksum = edge_crc32(self._fd, self._end)
        self.close()
        return self._end, checksum

    def close(self) -> None:
        """Idempotent; an unfinished file stays unreadable."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, name: str, entry: dict[str, Any], data: memoryview) -> None:
        with self._room.taking(len(data)):
            _write_all(self._fd, data, self._end)
        begin = self._end - HEADER_BYTES
        self._header[name] = {**entry, "data_offsets": [begin, begin + len(data)]}
        self._end += len(data)


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name to ``{"dtype", "shape", "data_offsets"}``. Raises StoreCorrupt when the file is not safetensors."""
    with open(path, "rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise StoreCorrupt(f"{path} has no safetensors header: {error}") from error
    header.pop("__metadata__", None)
    return header


def edge_crc32(fd: int, file_bytes: int) -> int:
    """CRC-32 of the first and the last MiB.

    The first covers the header with all names, shapes and offsets, the last the end of the data. Together with the
    file's size that catches truncation, exchanged files and stray writes at the edges at no cost that depends on the
    model; it does not catch a flipped bit in the middle, which memory with ECC does.
    """
    first = os.pread(fd, EDGE_BYTES, 0)
    last = os.pread(fd, EDGE_BYTES, max(0, file_bytes - EDGE_BYTES))
    return zlib.crc32(last, zlib.crc32(first))


def _entry_bytes(name: str, tensor: torch.Tensor) -> int:
    # Offsets are not known yet: 20 digits hold any.
    shape = json.dumps(list(tensor.shape))
    return len(json.dumps(name)) + len(shape) + len('{"dtype":"F8_E4M3","shape":,"data_offsets":[,]}:,') + 2 * 20


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
