"""Artifact: a compiled kernel as data, which runs without the DSL, on a GPU or on the emulator."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

from cute_attn.errors import ArtifactError
from cute_attn.runtime.spec import KernelSpec

_MAGIC = b"cute_attn artifact 2\n"
_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 28  # of an inflated file

PARAM_BYTES = {"i32": 4, "i64": 8, "f32": 4, "f64": 8, "map": 128}  # by kind


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
    dsl: str = ""  # version and flavour of the DSL that compiled it ("4.8.1 cu13")

    def is_of(self, spec: KernelSpec, arch: str) -> bool:
        """Tells whether this is the artifact of `spec` for `arch`."""
        return self.arch == arch and self.spec == json.loads(spec.key())

    def to_bytes(self) -> bytes:
        """Returns the content of a file: magic, sha256 of the rest, then deflated JSON header, cubin and PTX."""
        header = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        header.update(cubin=len(self.cubin), ptx=None, params=[dataclasses.astuple(p) for p in self.params])
        text = json.dumps(header).encode()
        body = zlib.compress(len(text).to_bytes(8, "little") + text + self.cubin + self.ptx.encode())
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Artifact:
        """Reads what `to_bytes` returned. Anything else raises ArtifactError, even under a digest that fits."""
        start = len(_MAGIC) + _DIGEST_BYTES
        body = data[start:]
        if data[:start] != _MAGIC + hashlib.sha256(body).digest():
            raise ArtifactError(f"not an intact artifact file ({len(data)} bytes)")
        try:
            return cls._parse(body)
        except Exception as err:  # malformed JSON, text, types, numbers, ...: whatever the parser meets
            raise ArtifactError(f"malformed artifact file ({len(data)} bytes): {type(err).__name__}: {err}") from err

    @classmethod
    def _parse(cls, body: bytes) -> Artifact:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(body, _MOST_BYTES)
        if not inflate.eof or inflate.unused_data:
            raise ValueError(f"not one deflated stream of at most {_MOST_BYTES} bytes")
        text_end = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:text_end])
        cubin_end = text_end + header.pop("cubin")
        if not text_end < cubin_end <= len(raw):
            raise ValueError("the cubin does not lie within the file")
        header["params"] = tuple(Param(*fields) for fields in header["params"])
        for name in ("block", "cluster"):
            header[name] = tuple(header[name])
        header["ptx"] = raw[cubin_end:].decode()
        artifact = cls(cubin=raw[text_end:cubin_end], **header)
        artifact._check()
        return artifact

    def _check(self) -> None:
        """Raises a ValueError for a field that no artifact has."""
        texts = self.arch, self.symbol, self.ptx, self.dsl
        counts = self.smem_bytes, self.registers, self.stack_bytes, self.mma_count
        if not all(type(text) is str for text in texts) or type(self.spec) is not dict:
            raise ValueError("arch, symbol, ptx and dsl must be texts, spec must be a dict")
        "".join(texts).encode()  # a ValueError for text that is not Unicode
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"smem_bytes, registers, stack_bytes and mma_count must be counts, got {counts}")
        for sizes in (self.block, self.cluster):
            if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"block and cluster must be three numbers > 0, got {sizes}")
        end = 0
        for param in self.params:
            numbers = param.offset, param.size
            if type(param.name) is not str or not all(type(number) is int for number in numbers):
                raise ValueError(f"not a parameter: {param}")
            if param.size != PARAM_BYTES[param.kind] or not end <= param.offset < _MOST_BYTES:
                raise ValueError(f"a parameter's size or offset is wrong: {param}")
            end = param.offset + param.size
