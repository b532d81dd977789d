"""Times other projects' decode attention on the grid of attn_cuda_bench, in the same way.

FlashInfer (paged, page size 16, with and without tensor cores) and torch's
scaled_dot_product_attention (contiguous keys and values; flash and cuDNN), each where it can be
imported. bf16, median over replays of one CUDA graph that runs over several copies of the keys and
values, so that they are cold in cache. Every result is compared with an fp32 computation first.
One JSON line per point.

    python benchmarks/python/attn_peers.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
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


class Inputs:
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


def sdpa_launches(inputs: Inputs, backend_name: str) -> list[Callable[[], Any]]:
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


def flashinfer_launches(inputs: Inputs, tensor_cores: bool) -> list[Callable[[], Any]]:
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


def peers() -> dict[str, Callable[[Inputs], list[Callable[[], Any]]]]:
    found: dict[str, Callable[[Inputs], list[Callable[[], Any]]]] = {
        "sdpa_flash": lambda inputs: sdpa_launches(inputs, "FLASH_ATTENTION"),
        "sdpa_cudnn": lambda inputs: sdpa_launches(inputs, "CUDNN_ATTENTION"),
    }
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        print(f"no FlashInfer: {error}")
    else:
        found["flashinfer"] = lambda inputs: flashinfer_launches(inputs, False)
        found["flashinfer_tensor_cores"] = lambda inputs: flashinfer_launches(inputs, True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="three shapes, contexts to 32768")
    parser.add_argument("--json", type=Path, help="file to append JSON lines to")
    arguments = parser.parse_args()
    import torch

    libraries = peers()
    lines = []
    for shape in SHAPES[:3] if arguments.quick else SHAPES:
        for batch, context in POINTS:
            if arguments.quick and context > 32768:
                continue
            inputs = Inputs(shape, batch, context)
            cells = []
            for name, prepare in libraries.items():
                line: dict[str, Any] = {
                    "bench": "attn_decode_peers",
                    "library": name,
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "q_heads": shape[0],
                    "kv_heads": shape[1],
                    "head_dim": shape[2],
                    "batch": batch,
                    "context": context,
                }
                try:
                    launches = prepare(inputs)
                    inputs.check(launches[0]())
                    line["median_us"] = graph_time_us(launches)
                    line["gb_per_s"] = inputs.kv_bytes / line["median_us"] / 1e3
                    cells.append(f"{name} {line['median_us']:.1f}")
                # A peer that refuses a shape is a result to report, whatever its exception type.
                except Exception as error:
                    line["error"] = str(error)[:200]
                    cells.append(f"{name} refused")
                lines.append(json.dumps(line))
            print(f"{shape} {batch}x{context}: " + ", ".join(cells), flush=True)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write("\n".join(lines) + "\n")
                lines = []


if __name__ == "__main__":
    main()
