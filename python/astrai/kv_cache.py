"""The paged KV cache of a model, and what a step needs to use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from astrai.extension import ops
from astrai.extension.devices import has_kernels
from astrai.extension.loader import load
from astrai.workspace import InferenceWorkspace, WorkspaceShape

if TYPE_CHECKING:
    from astrai.config import ModelConfig
    from astrai.extension.lib import _ext
else:
    _ext = load()

PagePool = _ext.PagePool
StepMetadata = _ext.StepMetadata

__all__ = ["KVCache", "KVStep", "PagePool", "StepMetadata"]

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
# A split of decode attention is not worth it below this many keys; the CPU cuts into equal parts of
# this length up to the given number, so that a request's result does not depend on its neighbours.
_SPLIT_KEYS = 256
_MAX_SPLITS = 64
# CUDA cuts into as many parts as fill the device once. No decode kernel has more blocks resident on
# a multiprocessor, and no part is shorter.
_CUDA_BLOCKS_PER_SM = 8
_CUDA_SPLIT_KEYS = 16


class KVStep:
    """Metadata of one step. Tensors are views of the workspace, valid until the next bind.

    R rows of requests: num_tasks, or pad_to if that was larger. T rows of tokens.

    phase         "decode" if every q_len is 1, else "prefill"
    num_tasks     requests;  num_tokens  their new tokens
    num_rows      R;  num_row_tokens  T (a padding request has one token that is written nowhere)
    qo_indptr     [R + 1] int32, rows of each request in q
    kv_indptr     [R + 1] int32, entries of each request in kv_indices
    kv_indices    [>= kv_indptr[R]] int32, page ids
    kv_lens       [R] int32, tokens of each request, the new ones included
    last_rows     [R] int64, row of each request's last token
    positions     [T] int64;  slot_mapping  [T] int64, page * page_size + offset, -1 for padding
    max_q_len, max_kv_len   longest of each
    num_splits    for decode attention; 0 lets the kernel choose
    o_part, ml_part  its scratch, float32 [>= R, Hq, splits, D | 2]
    cache         what a backend derives from the step once and reads in every layer
    """

    __slots__ = (
        "_host_kv_lens",
        "_page_size",
        "_workspace",
        "cache",
        "kv_indices",
        "kv_indptr",
        "kv_lens",
        "last_rows",
        "max_kv_len",
        "max_q_len",
        "ml_part",
        "num_row_tokens",
        "num_rows",
        "num_splits",
        "num_tasks",
        "num_tokens",
        "o_part",
        "phase",
        "positions",
        "q_lens",
        "qo_indptr",
        "slot_mapping",
    )

    phase: str
    num_tasks: int
    num_tokens: int
    num_rows: int
    num_row_tokens: int
    q_lens: tuple[int, ...]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    last_rows: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    max_q_len: int
    max_kv_len: int
    num_splits: int
    o_part: torch.Tensor
    ml_part: torch.Tensor
    cache: dict[str, Any]
    _workspace: InferenceWorkspace
    _page_size: int
    _host_kv_lens: list[int] | None

    @property
    def host_kv_lens(self) -> list[int]:
        """kv_lens as ints, without waiting for a device. Ask before the next bind."""
        if self._host_kv_lens is None:
            lens = self._workspace.host("kv_lens")[: self.num_rows]
            self._host_kv_lens = [int(length) for length in lens.tolist()]
        return self._host_kv_lens

    def requests(self) -> list[tuple[int, int, torch.Tensor]]:
        """(q_len, kv_len, page ids int64) of every row of requests, padding included."""
        known: list[tuple[int, int, torch.Tensor]] | None = self.cache.get("requests")
        if known is not None:
            return known
        starts = self._workspace.host("kv_indptr")[: self.num_rows].tolist()
        q_lens = self.q_lens + (1,) * (self.num_rows - self.num_tasks)
        result = []
        for start, q_len, kv_len in zip(starts, q_lens, self.host_kv_lens, strict=True):
            end = start + -(-kv_len // self._page_size)
            result.append((q_len, kv_len, self.kv_indices[start:end].long()))
        self.cache["requests"] = result
        return result


class KVCache:
    """Pages of all layers, the pool that hands them out, and the workspace of a step.

    L layers, P pages of S tokens, Hkv KV heads, D head dim. The storage is one tensor
    [2, L, P, S, Hkv, D]; k_pages[layer] and v_pages[layer] are its views [P, S, Hkv, D].

    The life of a step: pool.try_reserve each task -> bind -> the model runs, write per layer ->
    pool.append each task.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_batch: int,
        max_context: int,
        max_step_tokens: int,
        match_decode: bool = False,
    ) -> None:
        """Allocate pages and workspace.

        config           gives layers, heads, head dim, hidden and vocabulary size
        num_pages        P >= 1;  page_size  S >= 1, in tokens
        dtype            of keys and values: float32, float16 or bfloat16
        max_batch        requests of a step, padding included
        max_context      tokens of one request
        max_step_tokens  rows of a step, at least max_batch
        match_decode     CPU only: attention of prompts as of decoded tokens, bit for bit
        Raises ValueError naming the first value out of range, RuntimeError when memory runs out.
        """
        if dtype not in _DTYPE_NAMES:
            known = ", ".join(_DTYPE_NAMES.values())
            raise ValueError(f"kv_cache: dtype {dtype}; expected one of {known}")
        self.dtype = dtype
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        self.page_size, self.num_pages = page_size, num_pages
        self.max_batch, self.max_context = max_batch, max_context
        self.max_step_tokens = max_step_tokens
        self.match_decode = match_decode
        self.pool = PagePool(num_pages, page_size, max_task_tokens=max_context)
        self.workspace = InferenceWorkspace(
            WorkspaceShape(
                num_q_heads=config.num_q_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                max_batch=max_batch,
                max_context=max_context,
                max_step_tokens=max_step_tokens,
                page_size=page_size,
                max_splits=self._max_splits(config.num_kv_heads),
                dtype=_DTYPE_NAMES[dtype],
            ),
            self.device,
        )
        self.storage = torch.empty(
            (2, config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            device=self.device,
        )
        self.k_pages = tuple(self.storage[0].unbind(0))
        self.v_pages = tuple(self.storage[1].unbind(0))
        self._partials = {max_batch: (self.workspace.o_part, self.workspace.ml_part)}
        self._core = _ext.KVCache(self.storage[0], self.storage[1], self.pool, self.workspace.core)
        self._writes_by_kernel = has_kernels(self.storage.device)
        self._prefixes: dict[str, tuple[int, torch.Tensor]] = {}
        self._step: KVStep | None = None

    def _max_splits(self, num_kv_heads: int) -> int:
        """Parts of a request for which the workspace has room when the batch is full."""
        if self._on_cpu:
            return max(1, min(_MAX_SPLITS, -(-self.max_context // _SPLIT_KEYS)))
        num_sms: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        filling = -(-num_sms * _CUDA_BLOCKS_PER_SM // (self.max_batch * num_kv_heads))
        return max(1, min(filling, -(-self.max_context // _CUDA_SPLIT_KEYS)))

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes in all layers, keys and values together."""
        row = config.num_kv_heads * config.head_dim * dtype.itemsize
        return 2 * config.num_layers * page_size * row

    @property
    def num_layers(self) -> int:
        return len(self.k_pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of pages and workspace."""
        return self.storage.numel() * self.storage.element_size() + self.workspace.num_bytes

    @property
    def step(self) -> KVStep:
        """The step that was bound last. Raises RuntimeError before the first bind."""
        if self._step is None:
            raise RuntimeError("kv_cache: no step is bound; expected a call of bind first")
        return self._step

    def bind(self, task_ids: Sequence[int], q_lens: Sequence[int], *, pad_to: int = 0) -> KVStep:
        """Do the queued page copies and describe a step of q_lens[i] new tokens of task_ids[i].

        pad_to > 0 pads the step to that many requests, for graphs captured at fixed sizes.
        Raises ValueError, with no step changed, for an unknown or repeated task, a q_len below 1,
        too few reserved pages, or a step beyond max_batch, max_step_tokens or max_context.
        """
        if self._on_cpu:
            facts = self._core.bind(task_ids, q_lens, pad_to)
        else:
            self.apply_page_copies()
            self.workspace.wait_uploaded()
            facts = self.pool.bind_tasks(self.workspace.core, task_ids, q_lens, pad_to)
            self.workspace.upload(self.workspace.layout.step_metadata[0], facts.metadata_bytes)
        self._step = step = self._describe(facts, is_padded=pad_to > 0)
        step.q_lens = tuple(q_lens)
        return step

    def _describe(self, facts: StepMetadata, is_padded: bool) -> KVStep:
        step = KVStep()
        rows, tokens = facts.num_rows, facts.num_row_tokens
        step.phase = "decode" if facts.is_decode else "prefill"
        step.num_tasks, step.num_tokens = facts.num_tasks, facts.num_tokens
        step.num_rows, step.num_row_tokens = rows, tokens
        step.max_q_len, step.max_kv_len = facts.max_q_len, facts.max_kv_len
        step.num_splits = 0
        step.o_part, step.ml_part = self._partials_for(rows)
        prefix = self._prefix
        step.qo_indptr = prefix("qo_indptr", rows + 1)
        step.kv_indptr = prefix("kv_indptr", rows + 1)
        step.kv_lens = prefix("kv_lens", rows)
        step.last_rows = prefix("last_rows", rows)
        step.positions = prefix("positions", tokens)
        step.slot_mapping = prefix("slot_mapping", tokens)
        entries = facts.num_pages_used
        if is_padded and not self._on_cpu:
            # What a graph is captured with must not depend on the lengths of one step.
            entries = rows * -(-self.max_context // self.page_size)
        step.kv_indices = prefix("kv_indices", entries)
        step.cache = {}
        step._workspace, step._page_size = self.workspace, self.page_size
        step._host_kv_lens = None
        return step

    def _partials_for(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The workspace's split partials for a step of so many requests.

        On CUDA a small batch is cut into more parts than a full one, so the same memory is seen as
        fewer rows of more splits. The CPU cuts alike in any batch.
        """
        if self._on_cpu:
            return self._partials[self.max_batch]
        known = self._partials.get(rows)
        if known is None:
            o_part, ml_part = self._partials[self.max_batch]
            num_heads = o_part.shape[1]
            splits = o_part.shape[0] * o_part.shape[2] // rows  # rows: 1 to max_batch
            known = (
                _recut(o_part, rows, num_heads, splits),
                _recut(ml_part, rows, num_heads, splits),
            )
            self._partials[rows] = known
        return known

    def _prefix(self, name: str, length: int) -> torch.Tensor:
        """The first `length` entries of a slice; the same view while the length repeats."""
        known = self._prefixes.get(name)
        if known is not None and known[0] == length:
            return known[1]
        view = self.workspace.view(name)[:length]
        self._prefixes[name] = (length, view)
        return view

    def write(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the step's new rows k, v [T, Hkv, D] to their slots in a layer's pages.

        Raises ValueError when a shape, dtype or device differs.
        """
        step = self.step
        k_pages, v_pages = self.k_pages[layer_id], self.v_pages[layer_id]
        if self._writes_by_kernel:
            ops.kv_write(k, v, k_pages, v_pages, step.slot_mapping)
            return
        if k.shape != (step.num_row_tokens, *k_pages.shape[2:]) or v.shape != k.shape:
            raise ValueError(
                f"kv_cache: k has shape {list(k.shape)} and v {list(v.shape)}; "
                f"expected {[step.num_row_tokens, *k_pages.shape[2:]]}"
            )
        # Padding rows come last and have no slot.
        slots = step.slot_mapping[: step.num_tokens]
        k_pages.flatten(0, 1).index_copy_(0, slots, k[: step.num_tokens])
        v_pages.flatten(0, 1).index_copy_(0, slots, v[: step.num_tokens])

    def apply_page_copies(self) -> None:
        """Do the copies that the pool queued when it replaced shared pages; bind calls it."""
        if self._on_cpu:
            self._core.apply_page_copies()
            return
        # One by one: a page may be written by one copy and read by a later one.
        for source, target in self.pool.take_page_copies():
            self.storage[:, :, target] = self.storage[:, :, source]


def _recut(part: torch.Tensor, *shape: int) -> torch.Tensor:
    """The start of a contiguous [B, H, splits, width] seen as [*shape, width]."""
    rows = part.view(-1, part.shape[-1])[: math.prod(shape)]
    return rows.view(*shape, part.shape[-1])
