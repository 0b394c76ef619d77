"""`demo`: prefill of a prompt and token-by-token decode on this machine, every result checked.

With a GPU, it times the attention of Llama-3-8B. Without one, it runs a small model on CPU tensors through the same
calls, on the reference and with Hopper's kernels in the emulator, and compiles and lists the kernels that Hopper and
Blackwell would run for Llama-3-8B.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cute_attn.cli import explain, kernels, specs
from cute_attn.cli.terminal import table
from cute_attn.runtime import arch as archs
from cute_attn.runtime.spec import KernelSpec

if TYPE_CHECKING:
    import torch

COMPILED_ARCHS = ("sm_90a", "sm_100a")
TOLERANCE = 1.6e-2  # relative root-mean-square error of bfloat16 inputs and outputs
REPEATS = 10


class Model(NamedTuple):
    """Attention of a model, and the length of a conversation in tokens."""

    name: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    prompt: int
    steps: int

    def __str__(self) -> str:
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads, head dim {self.head_dim}"
        return f"{self.name}: {self.num_layers} layers, {heads}, bfloat16"


LLAMA = Model("Llama-3-8B", 32, 32, 8, 128, 4096, 32)
SMALL = Model("a small model", 2, 8, 2, 64, 256, 16)
EMULATED = SMALL._replace(prompt=128, steps=4)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="run prefill and decode on this machine, checked and timed",
        description="Exits 1 if a result is wrong or a kernel fails a gate.",
    )
    parser.add_argument("--cpu", action="store_true", help="do what a machine without a GPU does")


def run(options: argparse.Namespace) -> int:
    import torch

    if torch.cuda.is_available() and not options.cpu:
        return on_gpu(torch.device("cuda", torch.cuda.current_device()))
    return on_cpu()


class Conversation:
    """Queries, and a KV cache per layer that the prompt fills and each decode step extends by one token."""

    def __init__(self, model: Model, device: torch.device, backend: str = "auto") -> None:
        import torch

        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.backend = backend
        self.model, capacity = model, model.prompt + model.steps
        kv_shape = (model.num_layers, capacity, model.num_kv_heads, model.head_dim)
        self.k, self.v = normal(*kv_shape), normal(*kv_shape)
        self.q = normal(capacity, model.num_qo_heads, model.head_dim)

    def prefill(self, layer: int) -> torch.Tensor:
        """Computes the causal attention of the prompt to itself."""
        from cute_attn import single_prefill_with_kv_cache

        n = self.model.prompt
        k, v = self.k[layer, :n], self.v[layer, :n]
        return cast("torch.Tensor", single_prefill_with_kv_cache(self.q[:n], k, v, causal=True, backend=self.backend))

    def decode(self, layer: int, n: int) -> torch.Tensor:
        """Computes the attention of token n to the n tokens of the cache, itself included."""
        from cute_attn import single_decode_with_kv_cache

        k, v = self.k[layer, :n], self.v[layer, :n]
        return cast("torch.Tensor", single_decode_with_kv_cache(self.q[n - 1], k, v, backend=self.backend))[None]

    def outputs(self) -> Iterator[tuple[str, int, torch.Tensor, int]]:
        """Yields (phase, layer, output, cache length): prefill in the first and last layer, then every decode step."""
        last = self.model.num_layers - 1
        for layer in (0, last):
            yield "prefill", layer, self.prefill(layer), self.model.prompt
        for n in range(self.model.prompt + 1, self.model.prompt + self.model.steps + 1):
            layer = n % self.model.num_layers
            yield "decode", layer, self.decode(layer, n), n

    def errors(self, truth: Callable[..., torch.Tensor]) -> dict[str, float]:
        """Returns the largest relative root-mean-square error of each phase against `truth(q, k, v)`."""
        import torch

        worst = {"prefill": 0.0, "decode": 0.0}
        for phase, layer, o, n in self.outputs():
            q = self.q[n - o.shape[0] : n]
            expected = truth(q, self.k[layer, :n], self.v[layer, :n])
            difference = torch.linalg.vector_norm(o.to(expected.dtype) - expected)
            error = float(difference / torch.linalg.vector_norm(expected))
            worst[phase] = max(worst[phase], error) if error == error else error  # max would drop a NaN
        return worst


def show(header: Sequence[str], rows: Sequence[Sequence[str]], errors: dict[str, float]) -> bool:
    """Prints a table of phases, named first in each row, with their errors; tells whether these are small."""
    verdicts = {phase: f"{error:.1e} {'ok' if error <= TOLERANCE else 'WRONG'}" for phase, error in errors.items()}
    print(table((*header, "error against fp64"), [(*row, verdicts[row[0]]) for row in rows], left=len(header[:2])))
    return all(error <= TOLERANCE for error in errors.values())


def by_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns causal attention in fp64, where the last row of q sees all keys."""
    from cute_attn.reference import attention as reference

    o, _ = reference.attention(q, k, v, mask=reference.Mask(causal=True))
    return o


def by_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns torch's attention in fp64, which is independent of the reference that CPU tensors run on."""
    import torch

    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    causal = q.shape[1] == k.shape[1]  # prefill; a decode step sees all keys
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return o.transpose(0, 1)


def on_gpu(device: torch.device) -> int:
    import torch

    arch = archs.for_device(device.index)
    print(f"{torch.cuda.get_device_name(device)} ({arch.name}). The attention of {LLAMA}\n")
    conversation = Conversation(LLAMA, device)
    errors = conversation.errors(by_reference)  # also compiles and loads the kernels
    prompt, n = LLAMA.prompt, LLAMA.prompt + LLAMA.steps
    prefill_s = graph_seconds(conversation.prefill) / LLAMA.num_layers
    decode_s = graph_seconds(lambda layer: conversation.decode(layer, n)) / LLAMA.num_layers
    flops = 2 * (prompt * (prompt + 1) // 2) * 2 * LLAMA.head_dim * LLAMA.num_qo_heads
    num_bytes = 2 * 2 * LLAMA.head_dim * (n * LLAMA.num_kv_heads + LLAMA.num_qo_heads)
    rows = [
        ("prefill", f"{prompt} tokens, causal", f"{prefill_s * 1e6:.1f} us", f"{flops / prefill_s / 1e12:.1f} TFLOP/s"),
        ("decode", f"1 token, cache of {n}", f"{decode_s * 1e6:.1f} us", f"{num_bytes / decode_s / 1e9:.0f} GB/s"),
    ]
    accurate = show(("phase", "work", "per layer", "speed"), rows, errors)
    print(f"\n{LLAMA.steps} decode steps over the growing cache were checked, prefill in two layers.")
    return 0 if accurate else 1


def graph_seconds(call: Callable[[int], Any]) -> float:
    """Returns the seconds of one call per layer in a CUDA graph; the caches of all layers (537 MB) exceed L2."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LLAMA.num_layers):
            call(layer)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / REPEATS


def on_cpu() -> int:
    import torch

    print(f"No GPU in use: {SMALL}, on CPU tensors.\nThe reference computes them; torch's SDPA checks the results.\n")
    work = ("prefill", f"{SMALL.prompt} tokens, causal"), ("decode", f"{SMALL.steps} steps over the growing cache")
    accurate = show(("phase", "work"), work, Conversation(SMALL, torch.device("cpu")).errors(by_sdpa))
    print(f"\nKernels that {' and '.join(COMPILED_ARCHS)} would run for {LLAMA.name}, compiled here:\n", flush=True)
    outcomes = specs.compile_all({arch: kernel_specs(LLAMA, arch) for arch in COMPILED_ARCHS}, None)
    failed = {key: specs.failures(*key, outcome) for key, outcome in outcomes.items()}
    print(kernels.report(outcomes, failed))
    return 0 if on_emulator() and accurate and not any(failed.values()) else 1


def on_emulator() -> bool:
    """Runs Hopper's kernels from their PTX on a few tokens, every access checked; tells whether SDPA agrees."""
    import torch

    from cute_attn.emulator import using

    print("\nKernels that sm_90a runs, emulated from their PTX: races, bounds and barriers checked.\n", flush=True)
    with using("sm_90a") as emulation:
        errors = Conversation(EMULATED, torch.device("cpu"), "emulator").errors(by_sdpa)
    counts = sum(record.stats.warp_instructions for record in emulation.records)
    seconds = sum(record.seconds for record in emulation.records)
    accurate = show(("phase",), [("prefill",), ("decode",)], errors)
    print(f"\n{len(emulation.records)} launches, {counts} warp instructions in {seconds:.1f} s, no errors found.")
    return accurate


def kernel_specs(model: Model, arch_name: str) -> list[KernelSpec]:
    """Returns the kernels that prefill of the prompt and the last decode step launch on this architecture."""
    from cute_attn.dispatch import select
    from cute_attn.dispatch.explain import DEFAULTS
    from cute_attn.dispatch.families import FAMILIES

    arch, sms = archs.named(arch_name), archs.TYPICAL_SMS[arch_name]
    shape = {name: getattr(model, name) for name in ("num_qo_heads", "num_kv_heads", "head_dim")}
    prompt = {"qo_len": model.prompt, "kv_len": model.prompt, "causal": True}
    token = {"kv_len": model.prompt + model.steps}
    found: list[KernelSpec] = []
    for options in (prompt, token):
        asked = explain.of_request(argparse.Namespace(**DEFAULTS | shape | options), arch, sms)
        _, launches = asked.planned(FAMILIES[select.choose(asked.features, "auto", arch, asked.load).name])
        found += [spec for spec, _ in launches]
    return list(dict.fromkeys(found))
