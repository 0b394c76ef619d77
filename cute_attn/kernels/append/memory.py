"""Accesses of 1 to 16 bytes, and elements of rows as floats."""

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

from cute_attn.kernels.append.spec import BLOCK
from cute_attn.kernels.blocks import ptx

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
_FORMS: dict[int, tuple[int, str]] = {1: (1, "u8"), 2: (1, "u16"), 4: (1, ""), 8: (2, ""), 16: (4, "")}  # by bytes
_LOADS = {size: ptx.Load("global", Int32, *form) for size, form in _FORMS.items()}
_STORES = {size: ptx.Store("global", Int32, *form) for size, form in _FORMS.items()}


def load(address: Int64, num_bytes: int) -> list[Int32]:
    found = _LOADS[num_bytes](address)
    return found if num_bytes > 4 else [found]


def store(address: Int64, num_bytes: int, words: list[Int32]) -> None:
    _STORES[num_bytes](address, 0, words)


def store_words(address: Int64, words: list[Int32], whole: bool) -> None:
    """Stores words at once, or byte by byte where nothing is known of the address."""
    if whole:
        store(address, 4 * len(words), words)
        return
    for i in range(4 * len(words)):
        store(address + Int64(i), 1, [words[i // 4] >> (8 * (i % 4))])


@dataclass(frozen=True)
class Elements:
    """Elements of `dtype` from `address`, `step` bytes apart."""

    dtype: str
    address: Int64
    step: Int64

    def at(self, index: Int32) -> Float32:
        """Loads element `index`."""
        (word,) = load(ptx.mad_u32(index, self.step, self.address), ITEMSIZE[self.dtype])
        return ptx.from_bits(word) if self.dtype == "float32" else ptx.unpack_16(self.dtype, word)[0]

    def block(self, vector: bool) -> list[Float32]:
        """Loads 16 elements, by 16 bytes if `vector` says that address and step allow it."""
        if not vector:
            return [self.at(Int32(i)) for i in range(BLOCK)]
        words = [w for i in range(0, BLOCK * ITEMSIZE[self.dtype], 16) for w in load(self.address + Int64(i), 16)]
        if self.dtype == "float32":
            return [ptx.from_bits(word) for word in words]
        return ptx.unpack_pairs(self.dtype, words)
