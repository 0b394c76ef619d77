"""Which unit of an SM executes an opcode of SASS, and the rates of the units, by architecture.

Rates are per SM and clock. Measured or documented by NVIDIA: tensor cores, MUFU, FMA, shared memory, issue. Assumed, as
no trustworthy figure is known: tensor memory (Blackwell), one clock per uniform instruction, IMAD as an FMA, F2FP and
three-input maxima at the rate of the ALU; on sm_120a and sm_121a all but the tensor cores' as on sm_100a.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

QUARTERS = 4  # of an SM: warp w issues on quarter w mod 4
_OPCODES = {
    "MUFU": "MUFU",
    "FMA2": "FFMA2 FADD2 FMUL2",  # two lanes of f32 each
    "FMA": "FFMA FADD FMUL HFMA2 HADD2 HMUL2 IMAD FFMA32I FMUL32I",
    "ALU": "FMNMX FMNMX3 FSEL SEL LOP3 LOP SHF SHL SHR PRMT F2FP F2F I2F F2I ISETP FSETP IADD IADD3 VIADD VIADDMNMX "
    "VIMNMX VIMNMX3 LEA MOV PLOP3 R2P P2R CS2R SGXT BMSK POPC FLO IABS HSETP2 FCHK IMNMX VOTE HMNMX2 REDUX",
    "TMEM": "LDTM STTM LDT STT LDTMRED",
    "smem": "LDS STS ATOMS STAS LDSM STSM",
    "barrier": "SYNCS BAR FENCE DEPBAR LDGDEPBAR MEMBAR UTCBAR WARPSYNC WARPGROUP BSYNC BSSY ERRBAR CCTL ACQBULK",
    "tensor": "HMMA QMMA IMMA OMMA HGMMA QGMMA IGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
    "uniform": "R2UR S2UR LDCU VOTEU",
    "branch": "BRA BRX EXIT RET CALL NOP BREAK BMOV YIELD NANOSLEEP ELECT",
    "memory": "LDG STG LD ST LDC RED ATOM ATOMG LDGSTS LDL STL S2R SHFL MOVM UBLKCP UTMALDG UTMASTG "
    "UTMACMDFLUSH UTMACCTL",
}
_UNIT_OF = {opcode: unit for unit, opcodes in _OPCODES.items() for opcode in opcodes.split()}


def unit(opcode: str) -> str:
    """Returns the unit of an opcode with its modifiers: "FADD2.FTZ.RM" is of "FMA2". Others are "other"."""
    base = opcode.partition(".")[0]
    return _UNIT_OF.get(base) or ("uniform" if base.startswith("U") else "other")


def columns(opcode: str) -> int:
    """Returns the columns of tensor memory, of 32 lanes, that a load or store moves."""
    found = re.search(r"\.x(\d+)", opcode)
    return int(found[1]) if found else 1


def words(opcode: str) -> int:
    """Returns the 32-bit words per lane of an access to shared memory; matrices of LDSM and STSM are a word each."""
    if found := re.search(r"\.([124])$", opcode):
        return int(found[1])
    return 4 if ".128" in opcode else 2 if ".64" in opcode else 1


def flops(opcode: str) -> float:
    """Returns the operations of a warp's matrix instruction, in terms of 16-bit operands: HMMA.16816 multiplies 16 x 16
    by 16 x 8. 0 for those whose shape the opcode does not tell.
    """
    shape = re.match(r"[HQO]MMA(?:\.SF)?\.(16)(8)(\d+)", opcode)
    if not shape:
        return 0
    bits = {"H": 16, "Q": 8, "O": 4}[opcode[0]]
    m, n, k = map(int, shape.groups())
    return 2 * m * n * k * bits / 16


@dataclass(frozen=True)
class Rates:
    """Rates of one SM."""

    tensor_flops: int  # dense, 16-bit operands; twice that with 8 bits
    mufu_lanes: int = 16
    fma_lanes: int = 128
    alu_lanes: int = 64
    uniform_per_quarter: int = 1
    smem_bytes: int = 128
    tmem_bytes: int = 0  # none: there is no tensor memory

    def clocks(self, unit_name: str) -> float:
        """Returns the clocks that a warp instruction holds its quarter's share of a unit."""
        lanes = {"MUFU": self.mufu_lanes, "FMA": self.fma_lanes, "FMA2": self.fma_lanes / 2, "ALU": self.alu_lanes}
        if unit_name == "uniform":
            return 1 / self.uniform_per_quarter
        return 32 * QUARTERS / lanes[unit_name]


RATES = {
    "sm_90a": Rates(4096),
    "sm_100a": Rates(8192, tmem_bytes=512),
    "sm_103a": Rates(8192, mufu_lanes=32, tmem_bytes=512),
    "sm_120a": Rates(512),
    "sm_121a": Rates(512),
}
