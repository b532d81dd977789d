"""Paged decode attention against the time that reading its keys and values takes.

SmolLM2's heads (9 query, 3 KV, D = 64), 4096 tokens a request, pages of 16 in shuffled order. The
calls go round over enough copies of the KV cache that each finds its pages cold in the processor's
caches. The bandwidth is measured in the same rounds with the same number of threads, by summing a
buffer that is cold as well: bytes of K and V / bandwidth is the floor, and the ratio to it the
figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from harness import Report, interleave, parse_arguments, ratios, seconds, use_threads

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
# Several times the last-level cache of any machine that this runs on.
COLD_BYTES = 512 << 20


def attention_run(
    batch: int, kv_len: int, dtype_name: str, cold_bytes: int
) -> tuple[Callable[[], float], int]:
    """Returns a function that gives the seconds of one cold call, and the bytes of K and V read."""
    import torch

    from astrai.extension import ops

    dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(0)
    pages_per_request = -(-kv_len // PAGE_SIZE)
    num_pages = batch * pages_per_request
    shape = (num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    kv_bytes = 2 * batch * kv_len * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    copies = []
    for _ in range(max(2, cold_bytes // kv_bytes)):
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        indices = torch.randperm(num_pages, generator=generator).to(torch.int32)
        copies.append((k, v, indices))
    q = torch.randn((batch, NUM_Q_HEADS, HEAD_DIM), generator=generator).to(dtype)
    out = torch.empty_like(q)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * pages_per_request
    lens = torch.full((batch,), kv_len, dtype=torch.int32)
    _verify(q, copies[0], indptr, lens)

    def run() -> float:
        times = []
        for k, v, indices in copies:
            started = time.perf_counter()
            ops.attn_paged_decode(q, k, v, indptr, indices, lens, out=out)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    return run, kv_bytes


def _verify(q, copy, indptr, lens) -> None:
    """Compares one call with torch's attention before anything is timed."""
    import torch

    from astrai.extension import ops

    k_pages, v_pages, indices = copy
    out = ops.attn_paged_decode(q, k_pages, v_pages, indptr, indices, lens)
    batch, kv_len = q.shape[0], int(lens[0])
    k, v = (
        pages[indices.long()].reshape(batch, -1, NUM_KV_HEADS, HEAD_DIM)[:, :kv_len].float()
        for pages in (k_pages, v_pages)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float()[:, :, None], k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
    )[:, :, 0]
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def read_run(num_bytes: int) -> Callable[[], float]:
    """Returns a function that gives the bandwidth in GB/s of reading a cold buffer once."""
    import torch

    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    return lambda: num_bytes / 1e9 / seconds(lambda: buffer.sum())


def main() -> None:
    """Measures and writes benchmarks/results/attention_decode_bench.json."""
    arguments = parse_arguments(__doc__ or "")
    use_threads(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    kv_len, cold_bytes = (256, 8 << 20) if arguments.smoke else (4096, COLD_BYTES)
    report = Report("attention_decode_bench", arguments)
    for dtype in ("bfloat16", "float32"):
        for batch in (1, 8):
            attend, kv_bytes = attention_run(batch, kv_len, dtype, cold_bytes)
            runs = {"attention": attend, "read": read_run(cold_bytes)}
            for run in runs.values():
                run()
            samples = interleave(runs, arguments.rounds)
            floors = [kv_bytes / 1e9 / bandwidth for bandwidth in samples["read"]]
            shape = {"batch": batch, "kv_len": kv_len, "dtype": dtype, "kv_bytes": kv_bytes}
            report.add("read bandwidth", "GB/s", samples["read"], **shape)
            report.add("attention", "us", [t * 1e6 for t in samples["attention"]], **shape)
            report.add(
                "attention / read of the same bytes",
                "ratio",
                ratios(samples["attention"], floors),
                target="< 1.5",
                **shape,
            )
    report.write()


if __name__ == "__main__":
    main()
