"""Compare the machine code of two kernel caches: `python -m tests.support.compare_cubins BEFORE AFTER`.

Compile the same kernels from two checkouts into two caches first (CONTRIBUTING.md). Renaming a field of a spec changes
the key: map the old name to the new one in `cubins` for that comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cute_attn.runtime.artifact import Artifact


def cubins(directory: Path) -> dict[str, bytes]:
    """Return the cubins of a cache by architecture and spec."""
    artifacts = (Artifact.from_bytes(path.read_bytes()) for path in directory.glob("*.artifact"))
    return {f"{a.arch} {json.dumps(a.spec, sort_keys=True)}": a.cubin for a in artifacts}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = cubins(options.before), cubins(options.after)
    both = sorted(before.keys() & after.keys())
    different = [key for key in both if before[key] != after[key]]
    print(len(both), "compared;", len(different), "differ", *different, sep="\n")
    return 1 if different or not both else 0


if __name__ == "__main__":
    sys.exit(main())
