"""`warmup`: compiles all kernels that a model's attention may need into the cache, in parallel."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_attn.cli import specs
from cute_attn.cli.terminal import format_seconds
from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.runtime import cache
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec

if TYPE_CHECKING:
    from cute_attn.problem import Features

SOURCES = ("paged", "ragged", "dense")
HALF = ("bfloat16", "float16")
KV_DTYPES = (*HALF, "float8_e4m3fn", "float8_e5m2", "nvfp4")


class Shape(NamedTuple):
    """Attention of one kind of layer on one GPU. `latent`: its paged cache holds latent rows (MLA), which decode reads;
    these heads and dimensions are those of prompts, whose keys and values are decompressed.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int
    dtype: str
    soft_cap: bool = False
    sinks: bool = False
    latent: bool = False

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_vo else f"{self.head_dim}/{self.head_dim_vo}"
        options = [name for name in ("soft_cap", "sinks", "latent") if getattr(self, name)]
        return ", ".join((f"{self.num_qo_heads}/{self.num_kv_heads} heads", f"head dim {dims}", self.dtype, *options))

    def features(self, kv_dtype: str, source: str, decode: bool) -> Features:
        """Returns what selection knows of a call on a GPU."""
        import torch

        from cute_attn.dispatch.explain import DEFAULTS, settings_of

        told = {"kv_dtype": kv_dtype, "logits_soft_cap": 1.0 if self.soft_cap else None}
        options = argparse.Namespace(**DEFAULTS | self._asdict() | told)
        return settings_of(options, device=torch.device("cuda"), kv_source=source, decode=decode).features


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile all kernels for a model's shapes into the cache",
        description=(
            "Compiles the kernels of every backend that auto may choose for the model, so that no call has to: "
            "prefill and decode of any length, any page size, with and without sliding windows, and copies into paged "
            "caches. Kernels that are in the cache stay there. Exits 1 if no backend takes the model, or a kernel does "
            "not compile."
        ),
    )
    add_options(parser)
    specs.add_targets(parser, None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe the attention of a model."""
    parser.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="config.json of a transformers model, or its directory: heads, head dimensions, dtype, soft cap, sinks",
    )
    parser.add_argument("--num-qo-heads", type=int, metavar="N", help="number of query heads (without --model-config)")
    parser.add_argument("--num-kv-heads", type=int, metavar="N", help="number of kv heads (default: --num-qo-heads)")
    parser.add_argument("--head-dim", type=int, metavar="N", help="head dimension of q and k (without --model-config)")
    parser.add_argument("--head-dim-vo", type=int, metavar="N", help="head dimension of v (default: --head-dim)")
    parser.add_argument("--logits-soft-cap", action="store_true", help="logits have a soft cap")
    parser.add_argument("--sinks", action="store_true", help="attention has sinks")
    parser.add_argument("--dtype", choices=HALF, help="dtype of q (default: the model's, else bfloat16)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the heads (default 1)")
    parser.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="A,B",
        help=f"dtypes of k and v: auto (default: that of q), {', '.join(KV_DTYPES)}",
    )
    parser.add_argument(
        "--kv-source",
        default=",".join(SOURCES),
        metavar="A,B",
        help="where k and v are: paged, ragged (batch wrappers), dense (single requests); default all",
    )


def describes_a_model(options: argparse.Namespace) -> bool:
    """Whether any option of `add_options` was given."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return any(getattr(options, name) != default for name, default in vars(parser.parse_args([])).items())


def run(options: argparse.Namespace) -> int:
    shapes = shapes_of(options)
    chosen, refused = of_model(options, shapes, specs.targets(options.arch))
    keys = [cache.cache_key(spec, arch) for arch, found in chosen.items() for spec in found]
    before = sum(key is not None and cache.path_of(key).exists() for key in keys)
    start = time.monotonic()
    outcomes = specs.compile_all(chosen, options.jobs)
    seconds = time.monotonic() - start
    failures = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, ArtifactError)]
    if options.json:
        document = {
            "shapes": [shape._asdict() for shape in shapes],
            "kernels": {arch: [spec.asdict() for spec in found] for arch, found in chosen.items()},
            "before": before,
            "failures": failures,
            "refused": refused,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(document, indent=1))
    else:
        told: dict[str, Sequence[object]] = {"attention of one GPU": shapes, "no backend": refused, "failed": failures}
        print("".join(f"{what}: {line}\n" for what, lines in told.items() for line in lines), end="")
        where = ", ".join(f"{len(found)} for {arch}" for arch, found in chosen.items())
        print(f"{len(outcomes)} kernels ({where}), {before} of them there before, {len(failures)} failed", end="")
        print(f", in {format_seconds(seconds)}; cache: {cache.directory()}")
    return 1 if failures or not outcomes else 0


def of_model(
    options: argparse.Namespace, shapes: Sequence[Shape], arches: Sequence[Arch]
) -> tuple[dict[str, list[KernelSpec]], list[str]]:
    """Returns the kernels of a model by architecture, and why some calls have none."""
    kv_dtypes = _listed("--kv-dtype", options.kv_dtype, ("auto", *KV_DTYPES))
    sources = _listed("--kv-source", options.kv_source, SOURCES)
    chosen: dict[str, list[KernelSpec]] = {}
    refused: list[str] = []
    for arch in arches:
        found: list[KernelSpec] = []
        for shape in shapes:
            for kv_dtype in kv_dtypes:
                kernels, reasons = needed(shape, shape.dtype if kv_dtype == "auto" else kv_dtype, sources, arch)
                found += kernels
                refused += reasons
        chosen[arch.name] = list(dict.fromkeys(found))
    return chosen, list(dict.fromkeys(refused))


def _listed(name: str, text: str, choices: Sequence[str]) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if part not in choices:
            raise ArgumentError(f"{name} must list some of {', '.join(choices)}, got {part!r}")
    return list(dict.fromkeys(found))


def needed(shape: Shape, kv_dtype: str, sources: Sequence[str], arch: Arch) -> tuple[list[KernelSpec], list[str]]:
    """Returns the kernels that "auto" may choose for a shape, and why it finds none for some calls."""
    from cute_attn.dispatch import select
    from cute_attn.dispatch.capabilities import ROWS_CLASSES, Load
    from cute_attn.dispatch.families import FAMILIES
    from cute_attn.errors import NotSupported
    from cute_attn.kernels.mla.tiles import specs_of_cache
    from cute_attn.kernels.plan.spec import PlanSpec
    from cute_attn.kernels.xqa.spec import LengthsSpec

    found: list[KernelSpec] = []
    reasons = []
    if shape.latent and "paged" in sources:
        found += specs_of_cache(shape.dtype, "" if kv_dtype == shape.dtype else kv_dtype, arch)
        reasons += [] if found else [f"{arch.name}; latent attention over a cache of {kv_dtype}"]
    plain = [source for source in sources if not (shape.latent and source == "paged")]
    for source, decode in product(plain, (False, True)):
        try:
            asked = shape.features(shape.dtype if shape.latent else kv_dtype, source, decode)
        except ArgumentError as error:  # other dtypes may have kernels
            reasons.append(f"{arch.name}: {error}")
            continue
        calls = [asked, asked._replace(device_lengths=True)] if decode and source == "paged" else [asked]
        for features in calls:
            try:
                loads = map(Load._make, product(ROWS_CLASSES[8 * features.kv_dtype.itemsize], (False, True)))
                backends = {select.choose(features, "auto", arch, load).name for load in loads}
            except NotSupported as error:
                reasons.append(f"{select.title(features, arch)}: {error.refusals[0]}")
                continue
            for name in sorted(backends):
                found += FAMILIES[name].specs(features, arch)
    if found and "paged" in sources:
        found += _appends(shape.dtype, kv_dtype)
    if found and {"paged", "ragged"} & {*sources}:
        found += [PlanSpec(), LengthsSpec()]  # of lengths on the GPU
    return found, reasons


def _appends(dtype: str, kv_dtype: str) -> list[KernelSpec]:
    """Returns the kernels that write rows of `dtype` to caches of `kv_dtype`."""
    from cute_attn.kernels.append.spec import COPY, AppendSpec, default_specs

    stored = kv_dtype if kv_dtype == "nvfp4" else COPY
    specs = (spec for spec in default_specs() if isinstance(spec, AppendSpec))
    return [spec for spec in specs if spec.stored == stored and spec.dtype in ("", dtype)]


# ---- shapes: from options, or from the configuration of a transformers model


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """Returns the shapes that the options name, on one of `--tp` GPUs."""
    named = [name for name in ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo") if getattr(options, name)]
    if options.model_config is not None:
        if named or options.logits_soft_cap or options.sinks:
            raise ArgumentError("--model-config tells heads and options of attention: give no others with it")
        found = of_config(read_config(options.model_config), options.dtype)
    else:
        if options.num_qo_heads is None or options.head_dim is None:
            raise ArgumentError("a model needs --model-config, or --num-qo-heads and --head-dim")
        kv_heads = options.num_kv_heads or options.num_qo_heads
        dims = options.head_dim, options.head_dim_vo or options.head_dim
        dtype = options.dtype or "bfloat16"
        found = [Shape(options.num_qo_heads, kv_heads, *dims, dtype, options.logits_soft_cap, options.sinks)]
    return list(dict.fromkeys(sharded(shape, options.tp) for shape in found))


def sharded(shape: Shape, tp: int) -> Shape:
    """Returns the heads of one of `tp` GPUs; kv heads that are fewer are copied to several."""
    if min(shape[:4]) < 1 or tp < 1:
        raise ArgumentError(f"heads, head dimensions and --tp must be at least 1, got {shape}, --tp {tp}")
    if shape.num_qo_heads % shape.num_kv_heads:
        raise ArgumentError(f"{shape.num_qo_heads} query heads are no multiple of {shape.num_kv_heads} kv heads")
    if shape.num_qo_heads % tp or (shape.num_kv_heads % tp and tp % shape.num_kv_heads):
        raise ArgumentError(f"--tp {tp} does not divide {shape.num_qo_heads} query heads and {shape.num_kv_heads}")
    return shape._replace(num_qo_heads=shape.num_qo_heads // tp, num_kv_heads=max(shape.num_kv_heads // tp, 1))


def read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration of a language model; of a model of several kinds of input that of its text part."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--model-config {path} is not a readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"--model-config {path} holds no configuration")
    text = config.get("text_config")
    return {"dtype": config.get("dtype"), "torch_dtype": config.get("torch_dtype"), **text} if text else config


def of_config(config: dict[str, Any], dtype: str | None) -> list[Shape]:
    """Returns the kinds of layers of a model."""
    from cute_attn.kernels.mla.spec import LATENT, ROPE

    heads = config.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise ArgumentError(f"the configuration has no number of attention heads: num_attention_heads is {heads!r}")
    found = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    found = found if found in HALF else "bfloat16"  # weights in 32 bits are converted before they are served
    if rank := config.get("kv_lora_rank"):
        rope, nope = config.get("qk_rope_head_dim"), config.get("qk_nope_head_dim") or 0
        if rank != LATENT or rope != ROPE:
            needed = f"kv_lora_rank {LATENT} and qk_rope_head_dim {ROPE}"
            raise ArgumentError(f"latent attention has kernels for {needed}, the configuration has {rank} and {rope}")
        return [Shape(heads, heads, nope + ROPE, config.get("v_head_dim") or nope, found, latent=True)]
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    shape = Shape(
        heads,
        config.get("num_key_value_heads") or heads,
        width,
        config.get("v_head_dim") or width,
        found,
        bool(config.get("attn_logit_softcapping")),
        config.get("model_type") == "gpt_oss",
    )
    # Layers with global attention may have heads of their own (gemma 4).
    wide = shape._replace(
        num_kv_heads=config.get("num_global_key_value_heads") or shape.num_kv_heads,
        head_dim=config.get("global_head_dim") or shape.head_dim,
        head_dim_vo=config.get("global_head_dim") or shape.head_dim_vo,
    )
    return list(dict.fromkeys((shape, wide)))
