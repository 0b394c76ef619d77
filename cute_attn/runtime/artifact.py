"""Artifact: a compiled kernel as data, which runs without the DSL, on a GPU or on the emulator."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

from cute_attn.errors import ArtifactError

_MAGIC = b"cute_attn artifact 1\n"
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Param:
    """Kernel parameter as the cubin declares it. `kind`: "i32", "i64", "f32", "f64", "map" (tensor map)."""

    name: str
    kind: str
    offset: int  # bytes
    size: int  # bytes


@dataclass(frozen=True)
class Artifact:
    """Cubin and PTX of one spec for one arch, with everything that a launch needs."""

    arch: str
    symbol: str
    cubin: bytes
    ptx: str
    params: tuple[Param, ...]
    block: tuple[int, int, int]
    smem_bytes: int  # dynamic shared memory
    registers: int
    stack_bytes: int
    mma_count: int  # matrix instructions in the PTX
    spec: dict[str, Any]  # KernelSpec.asdict() after a round trip through JSON
    cluster: tuple[int, int, int] = (1, 1, 1)

    def to_bytes(self) -> bytes:
        """Returns the content of a file: magic, sha256 of the rest, then deflated JSON header, cubin and PTX."""
        header = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        header.update(cubin=len(self.cubin), ptx=None, params=[dataclasses.astuple(p) for p in self.params])
        text = json.dumps(header).encode()
        body = zlib.compress(len(text).to_bytes(8, "little") + text + self.cubin + self.ptx.encode())
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Artifact:
        """Reads what `to_bytes` returned. Any damage raises ArtifactError: the digest covers every byte."""
        start = len(_MAGIC) + _DIGEST_BYTES
        body = data[start:]
        if data[:start] != _MAGIC + hashlib.sha256(body).digest():
            raise ArtifactError(f"not an intact artifact file ({len(data)} bytes)")
        raw = zlib.decompress(body)
        text_end = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:text_end])
        cubin_end = text_end + header.pop("cubin")
        header["params"] = tuple(Param(*fields) for fields in header["params"])
        for name in ("block", "cluster"):
            header[name] = tuple(header[name])
        header["ptx"] = raw[cubin_end:].decode()
        return cls(cubin=raw[text_end:cubin_end], **header)
