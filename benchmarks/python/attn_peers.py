"""Times other projects' attention on the grids of the C++ benchmarks, in the same way.

Decode (attn_cuda_bench): FlashInfer (paged, page size 16, with and without tensor cores) and
torch's scaled_dot_product_attention (contiguous keys and values; flash and cuDNN). Causal prefill
(attn_prefill_cuda_bench): FlashInfer (contiguous keys and values, fa2) and the same two of torch.
Each where it can be imported. bf16, median over replays of one CUDA graph that runs over several
copies of the tensors, so that they are cold in cache. Every result is compared with an fp32
computation first. One JSON line per point.

    python benchmarks/python/attn_peers.py [--phase decode|prefill] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = [(32, 8, 128), (24, 4, 64), (16, 8, 128), (9, 3, 64), (8, 1, 256)]
POINTS = [
    (1, 512),
    (1, 4096),
    (1, 32768),
    (1, 131072),
    (8, 512),
    (8, 4096),
    (8, 32768),
    (64, 512),
    (64, 4096),
    (256, 1024),
]
PREFILL_POINTS = [(1, 512), (4, 512), (1, 2048), (4, 2048), (1, 8192), (4, 8192), (1, 32768)]
PAGE_SIZE = 16
COLD_BYTES = 200_000_000
REPLAYS = 25
TOLERANCE = 2e-2


def graph_time_us(launches: list[Callable[[], Any]]) -> float:
    """Median microseconds of one launch when all run in a captured graph."""
    import torch

    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    samples = []
    for i in range(REPLAYS + 3):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            samples.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(samples)


def expected_rows(q: Any, k: Any, v: Any) -> Any:
    """fp32 attention of q [B, Hq, D] over k, v [B, L, Hkv, D], one request at a time."""
    import torch

    rows = []
    for b in range(q.shape[0]):
        group = q.shape[1] // k.shape[2]
        grouped = q[b].float().view(k.shape[2], group, -1)
        scores = torch.einsum("hgd,lhd->hgl", grouped, k[b].float()) * q.shape[2] ** -0.5
        rows.append(torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v[b].float()).flatten(0, 1))
    return torch.stack(rows)


class DecodeInputs:
    """Copies of one grid point's tensors, cold in cache when used in turn."""

    def __init__(self, shape: tuple[int, int, int], batch: int, context: int) -> None:
        import torch

        self.q_heads, self.kv_heads, self.head_dim = shape
        self.batch, self.context = batch, context
        self.kv_bytes = batch * context * self.kv_heads * self.head_dim * 4
        copies = min(16, max(2, COLD_BYTES // self.kv_bytes + 1))
        kwargs = {"device": "cuda", "dtype": torch.bfloat16}
        kv_shape = (batch, context, self.kv_heads, self.head_dim)
        self.k = [torch.randn(kv_shape, **kwargs) for _ in range(copies)]
        self.v = [torch.randn(kv_shape, **kwargs) for _ in range(copies)]
        q_shape = (batch, self.q_heads, self.head_dim)
        self.q = [torch.randn(q_shape, **kwargs) for _ in range(copies)]
        self.expected = expected_rows(self.q[0], self.k[0], self.v[0])

    def check(self, found: Any) -> None:
        error = (found.float().view_as(self.expected) - self.expected).abs().max()
        largest = self.expected.abs().max()
        if not float(error) <= TOLERANCE * float(largest):
            raise RuntimeError(f"result differs by {float(error):.3g} of {float(largest):.3g}")


def sdpa_launches(inputs: DecodeInputs, backend_name: str) -> list[Callable[[], Any]]:
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, backend_name)
    launches = []
    for q, k, v in zip(inputs.q, inputs.k, inputs.v, strict=True):
        heads_first = [t.transpose(1, 2).contiguous() for t in (k, v)]

        one_query = q.unsqueeze(2)

        def launch(q: Any = one_query, kv: list[Any] = heads_first) -> Any:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, *kv, enable_gqa=True)

        launches.append(launch)
    return launches


def flashinfer_launches(inputs: DecodeInputs, tensor_cores: bool) -> list[Callable[[], Any]]:
    import flashinfer
    import torch

    pages_each = (inputs.context + PAGE_SIZE - 1) // PAGE_SIZE
    num_pages = inputs.batch * pages_each
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    indptr = torch.arange(inputs.batch + 1, dtype=torch.int32, device="cuda") * pages_each
    order = torch.randperm(num_pages, device="cuda")
    last = torch.full(
        (inputs.batch,), (inputs.context - 1) % PAGE_SIZE + 1, dtype=torch.int32, device="cuda"
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        indptr,
        order.to(torch.int32),
        last,
        inputs.q_heads,
        inputs.kv_heads,
        inputs.head_dim,
        PAGE_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    launches = []
    for q, k, v in zip(inputs.q, inputs.k, inputs.v, strict=True):
        paged = []
        for rows in (k, v):
            in_order = rows.reshape(num_pages, PAGE_SIZE, inputs.kv_heads, inputs.head_dim)
            pages = torch.empty_like(in_order)
            pages[order] = in_order
            paged.append(pages)

        def launch(q: Any = q, kv: tuple[Any, Any] = (paged[0], paged[1])) -> Any:
            return wrapper.run(q, kv)

        launches.append(launch)
    return launches


def expected_causal_rows(q: Any, k: Any, v: Any, first: int, count: int) -> Any:
    """fp32 causal attention of queries first .. first + count of the first request."""
    import torch

    group = q.shape[2] // k.shape[2]
    rows = q[0, first : first + count].float().view(count, k.shape[2], group, -1)
    keys, values = k[0, : first + count].float(), v[0, : first + count].float()
    scores = torch.einsum("qhgd,lhd->hgql", rows, keys) * q.shape[3] ** -0.5
    position = torch.arange(first, first + count, device=q.device)[:, None]
    hidden = torch.arange(first + count, device=q.device)[None, :] > position
    scores.masked_fill_(hidden, float("-inf"))
    return torch.einsum("hgql,lhd->qhgd", scores.softmax(-1), values).flatten(1, 2)


class PrefillInputs:
    """Copies of one grid point's tensors, [B, L, H, D]."""

    def __init__(self, shape: tuple[int, int, int], batch: int, length: int) -> None:
        import torch

        self.q_heads, self.kv_heads, self.head_dim = shape
        self.batch, self.length = batch, length
        pairs = length * (length + 1) / 2
        self.flop = 2 * 2 * batch * self.q_heads * self.head_dim * pairs
        rows = batch * length * self.head_dim
        copies = min(16, max(2, COLD_BYTES // (rows * 4 * (self.q_heads + self.kv_heads)) + 1))
        kwargs = {"device": "cuda", "dtype": torch.bfloat16}
        q_shape = (batch, length, self.q_heads, self.head_dim)
        kv_shape = (batch, length, self.kv_heads, self.head_dim)
        self.q = [torch.randn(q_shape, **kwargs) for _ in range(copies)]
        self.k = [torch.randn(kv_shape, **kwargs) for _ in range(copies)]
        self.v = [torch.randn(kv_shape, **kwargs) for _ in range(copies)]

    def check(self, found: Any) -> None:
        """`found` is [B, L, Hq, D]; long prompts are compared where they begin and end."""
        some = min(self.length, 64)
        for first in (0, self.length - some):
            expected = expected_causal_rows(self.q[0], self.k[0], self.v[0], first, some)
            error = (found[0, first : first + some].float() - expected).abs().max()
            largest = expected.abs().max()
            if not float(error) <= TOLERANCE * float(largest):
                raise RuntimeError(f"result differs by {float(error):.3g} of {float(largest):.3g}")


def sdpa_prefill_launches(inputs: PrefillInputs, backend_name: str) -> list[Callable[[], Any]]:
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, backend_name)
    launches = []
    for tensors in zip(inputs.q, inputs.k, inputs.v, strict=True):
        heads_first = [t.transpose(1, 2).contiguous() for t in tensors]

        def launch(qkv: list[Any] = heads_first) -> Any:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    *qkv, is_causal=True, enable_gqa=True
                ).transpose(1, 2)

        launches.append(launch)
    return launches


def flashinfer_prefill_launches(inputs: PrefillInputs) -> list[Callable[[], Any]]:
    import flashinfer
    import torch

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    indptr = torch.arange(inputs.batch + 1, dtype=torch.int32, device="cuda") * inputs.length
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        indptr,
        indptr,
        inputs.q_heads,
        inputs.kv_heads,
        inputs.head_dim,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    launches = []
    for q, k, v in zip(inputs.q, inputs.k, inputs.v, strict=True):
        rows = [t.flatten(0, 1) for t in (q, k, v)]

        def launch(qkv: list[Any] = rows, shape: Any = q.shape) -> Any:
            return wrapper.run(*qkv).view(shape)

        launches.append(launch)
    return launches


def has_flashinfer() -> bool:
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        print(f"no FlashInfer: {error}")
        return False
    return True


def decode_peers() -> dict[str, Callable[[Any], list[Callable[[], Any]]]]:
    found: dict[str, Callable[[Any], list[Callable[[], Any]]]] = {
        "sdpa_flash": lambda inputs: sdpa_launches(inputs, "FLASH_ATTENTION"),
        "sdpa_cudnn": lambda inputs: sdpa_launches(inputs, "CUDNN_ATTENTION"),
    }
    if has_flashinfer():
        found["flashinfer"] = lambda inputs: flashinfer_launches(inputs, False)
        found["flashinfer_tensor_cores"] = lambda inputs: flashinfer_launches(inputs, True)
    return found


def prefill_peers() -> dict[str, Callable[[Any], list[Callable[[], Any]]]]:
    found: dict[str, Callable[[Any], list[Callable[[], Any]]]] = {
        "sdpa_flash": lambda inputs: sdpa_prefill_launches(inputs, "FLASH_ATTENTION"),
        "sdpa_cudnn": lambda inputs: sdpa_prefill_launches(inputs, "CUDNN_ATTENTION"),
    }
    if has_flashinfer():
        found["flashinfer_fa2"] = flashinfer_prefill_launches
    return found


def without_paths(text: str) -> str:
    """An error's text without the places of files on this machine."""
    return re.sub(r"/\S+", "...", text)


def time_point(
    line: dict[str, Any], inputs: Any, prepare: Callable[[Any], list[Callable[[], Any]]]
) -> str:
    """Adds a library's figures to its line; returns a cell for the table."""
    try:
        launches = prepare(inputs)
        inputs.check(launches[0]())
        line["median_us"] = graph_time_us(launches)
    # A peer that refuses a shape is a result to report, whatever its exception type.
    except Exception as error:
        line["error"] = without_paths(f"{type(error).__name__}: {error}")[:200]
        return f"{line['library']} refused"
    if isinstance(inputs, PrefillInputs):
        line["tflop_per_s"] = inputs.flop / line["median_us"] / 1e6
        return f"{line['library']} {line['median_us']:.1f} us {line['tflop_per_s']:.0f} TFLOP/s"
    line["gb_per_s"] = inputs.kv_bytes / line["median_us"] / 1e3
    return f"{line['library']} {line['median_us']:.1f}"


def run_phase(phase: str, quick: bool, json_path: Path | None) -> None:
    import torch

    prefill = phase == "prefill"
    libraries = prefill_peers() if prefill else decode_peers()
    longest = 8192 if prefill else 32768
    for shape in SHAPES[:3] if quick else SHAPES:
        for batch, length in PREFILL_POINTS if prefill else POINTS:
            if quick and length > longest:
                continue
            inputs = (PrefillInputs if prefill else DecodeInputs)(shape, batch, length)
            lines, cells = [], []
            for name, prepare in libraries.items():
                line: dict[str, Any] = {
                    "bench": f"attn_{phase}_peers",
                    "library": name,
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "q_heads": shape[0],
                    "kv_heads": shape[1],
                    "head_dim": shape[2],
                    "batch": batch,
                    "length" if prefill else "context": length,
                }
                cells.append(time_point(line, inputs, prepare))
                lines.append(json.dumps(line))
            print(f"{shape} {batch}x{length}: " + ", ".join(cells), flush=True)
            if json_path:
                with json_path.open("a") as file:
                    file.write("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--phase", choices=["decode", "prefill"], help="one of them alone")
    parser.add_argument("--quick", action="store_true", help="three shapes, shorter contexts")
    parser.add_argument("--json", type=Path, help="file to append JSON lines to")
    arguments = parser.parse_args()
    for phase in [arguments.phase] if arguments.phase else ["decode", "prefill"]:
        run_phase(phase, arguments.quick, arguments.json)


if __name__ == "__main__":
    main()
