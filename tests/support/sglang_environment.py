"""Makes a virtual environment in which SGLang's engine runs on a CPU: `python -m tests.support.sglang_environment DIR`.

SGLang's wheel demands CUDA builds of torch, torchvision and a score of kernel packages. Its Python code needs none of
them on a CPU: torch for CPUs, the packages below, and two stand-ins. `torchvision` is imported at start-up, by
transformers too, and called by models with images alone; `vllm._custom_ops` has the rotary embedding that SGLang takes
on devices for which it has no kernel.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SGLANG = "sglang==0.5.23"
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGES = (
    *("transformers==5.19.0", "pytest", "nvidia-cutlass-dsl==4.8.0", "cuda-python", "filelock", "numpy", "triton"),
    *("aiohttp", "apache-tvm-ffi", "dill", "einops", "fastapi", "gguf", "ipython", "loguru", "msgspec", "openai"),
    *("orjson", "partial-json-parser", "pillow", "psutil", "pybase64", "pyzmq", "requests", "sentencepiece"),
    *("setproctitle", "starlette", "uvicorn", "uvloop"),
)
WITHOUT_DEPENDENCIES = ("compressed-tensors", "xgrammar")  # theirs would replace torch

REFUSING = """
def _absent(*args, **kwargs):
    raise NotImplementedError("a stand-in for torchvision")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent
"""

STAND_INS = {
    "torchvision/__init__.py": '__version__ = "0.28.0"\nfrom . import io, transforms\n',
    "torchvision/io.py": """
        import enum


        class ImageReadMode(enum.Enum):
            RGB = 3


        def decode_image(*args, **kwargs):
            raise NotImplementedError("a stand-in for torchvision")
        """,
    "torchvision/transforms/__init__.py": """
        import enum

        from . import functional, v2


        class InterpolationMode(enum.Enum):
            NEAREST = "nearest"
            NEAREST_EXACT = "nearest-exact"
            BILINEAR = "bilinear"
            BICUBIC = "bicubic"
            BOX = "box"
            HAMMING = "hamming"
            LANCZOS = "lanczos"
        """
    + textwrap.indent(REFUSING, " " * 8),
    "torchvision/transforms/functional.py": REFUSING,
    "torchvision/transforms/v2/__init__.py": "from . import functional\n" + REFUSING,
    "torchvision/transforms/v2/functional.py": REFUSING,
    "torchvision-0.28.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n",
    "torchvision-0.28.0.dist-info/RECORD": "",
    "vllm/__init__.py": "",
    "vllm/_custom_ops.py": """
        import torch


        def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
            assert is_neox
            cos, sin = (x[:, None] for x in cos_sin_cache[positions.flatten()].float().chunk(2, -1))
            for tensor in (query, key):
                rotated = tensor.view(len(cos), -1, head_size)[..., : 2 * cos.shape[-1]]
                low, high = rotated.float().chunk(2, -1)
                rotated.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), -1))
        """,
}


def main(folder: str) -> None:
    """Make the environment in a new folder."""
    venv = Path(folder)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-q", *arguments], check=True)

    pip(TORCH, "--extra-index-url", TORCH_INDEX)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:  # nothing may replace torch
        pinned.write(f"{TORCH}\n")
        pinned.flush()
        pip("-c", pinned.name, *PACKAGES)
    pip("--no-deps", SGLANG, *WITHOUT_DEPENDENCIES)
    pip("--no-deps", str(ROOT))
    paths = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    write_stand_ins(Path(paths.stdout.strip()))


def write_stand_ins(site_packages: Path) -> None:
    """Write the stand-ins for packages that SGLang imports and does not need."""
    for name, text in STAND_INS.items():
        path = site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))


if __name__ == "__main__":
    main(sys.argv[1])
