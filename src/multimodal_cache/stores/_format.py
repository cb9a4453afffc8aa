"""Names and values in a store, as they are for every back end and version of this package.

A *name* is 64 hex digits: the BLAKE3 hash of

- ``multimodal-cache store 1``, in ASCII, and a newline;
- the namespace: ``s`` for text or ``b`` for bytes, its length as 8 bytes, little-endian, and
  itself; text is UTF-8, its lone surrogates too;
- the key, in hexadecimal digits without leading zeros, after a ``-`` if it is negative.

A *value* is 32 bytes, and a safetensors file with one tensor, ``embedding``. The 32 bytes are the
BLAKE3 hash, keyed with the secret where there is one, of the name, in ASCII, and the file. So a
value that is damaged, cut, forged or under another's name is none.

The file is written and read here, since safetensors' own functions copy it several times: for
10 MiB that took longer than to get it from the store.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import math
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from multimodal_cache._hashing import count, threads_for

VERSION = b"multimodal-cache store 1\n"
DIGEST_BYTES = 32
SECRET_BYTES = 32
OVERHEAD_BYTES = 4096
"""More than a value has beside its elements."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""By safetensors' names, those that it reads as it has written them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_prefix(namespace: str | bytes) -> bytes:
    """Returns what is hashed before the key."""
    kind, content = b"b", namespace
    if isinstance(content, str):
        kind, content = b"s", content.encode("utf-8", "surrogatepass")
    return VERSION + kind + count(len(content)) + content


def name_of(prefix: bytes, key: int) -> str:
    """Returns the name of a key, after what ``name_prefix`` returned."""
    return blake3(prefix + f"{key:x}".encode()).hexdigest()


def pack(name: str, tensor: torch.Tensor, secret: bytes | None) -> bytes:
    """Returns the value of a dense tensor of one of ``DTYPES``, on any device."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    header = json.dumps(
        {
            "embedding": {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [0, tensor.nbytes],
            }
        }
    ).encode()
    header += b" " * (-len(header) % 8)  # so that the elements are aligned
    head = count(len(header)) + header
    elements = memoryview(_as_bytes(tensor))
    return b"".join((_digest(name, secret, head, elements), head, elements))


def unpack(name: str, value: Any, secret: bytes | None) -> torch.Tensor:
    """Returns the tensor of a value, in memory of its own on the CPU.

    Raises:
        ValueError: It isn't a value of that name.
    """
    if not isinstance(value, bytes):
        raise ValueError(f"a value must be bytes, got {type(value).__name__}")
    view = memoryview(value)
    file = view[DIGEST_BYTES:]
    if not hmac.compare_digest(view[:DIGEST_BYTES], _digest(name, secret, file)):
        raise ValueError("its digest is another")
    start = 8 + int.from_bytes(file[:8], "little")
    dtype, shape = _read_header(bytes(file[8:start]), len(file) - start)
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device is
    _as_bytes(tensor)[:] = file[start:]
    return tensor


def _digest(name: str, secret: bytes | None, *parts: bytes | memoryview) -> bytes:
    threads = threads_for(sum(map(len, parts)))
    hasher = blake3(name.encode(), key=secret, max_threads=threads)  # type: ignore[arg-type]  # None
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _read_header(header: bytes, nbytes: int) -> tuple[torch.dtype, list[int]]:
    """Returns the dtype and the shape.

    Raises:
        ValueError: There is anything that isn't as it is written here.
    """
    try:
        ((name, told),) = json.loads(header).items()
        dtype, shape, offsets = DTYPES[told["dtype"]], told["shape"], told["data_offsets"]
        counted = type(shape) is list and all(type(size) is int and size >= 0 for size in shape)
        known = (name, len(told), offsets) == ("embedding", 3, [0, nbytes])
        if known and counted and math.prod(shape) * dtype.itemsize == nbytes:
            return dtype, shape
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError("its header is malformed") from error
    raise ValueError("its header is malformed")


def _as_bytes(tensor: torch.Tensor) -> Any:
    """Returns the elements of a contiguous tensor on the CPU, uncopied; it doesn't hold them.

    (``tensor.numpy()`` would leave the storage unfit to be resized, and a cache would copy it.)
    """
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)
