"""Slow, exact attention for tests: float64, one full score matrix, nothing shared with a kernel."""

from __future__ import annotations

import numpy as np


def visible_keys(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    mask: np.ndarray | None = None,
    causal_offset: int = -1,
    window: int = -1,
) -> np.ndarray:
    """bool [B, Lq, Lk]: which keys a row sees. causal_offset below -1 means rows before key 0."""
    first = kv_len - q_len if causal_offset == -1 else causal_offset
    positions = first + np.arange(q_len)[:, None]
    keys = np.arange(kv_len)
    seen = np.ones((q_len, kv_len), bool)
    if causal_offset != -1:
        seen &= keys <= positions
    if window >= 1:
        seen &= keys > positions - window
    seen = np.broadcast_to(seen, (batch, q_len, kv_len)).copy()
    if mask is not None:
        seen &= mask if mask.ndim == 3 else mask[:, None]
    return seen


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray,
    *,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q [B, Lq, Hq, D], k and v [B, Lk, Hkv, D], seen [B, Lq, Lk] -> out, lse [B, Hq, Lq]."""
    q, k, v = (np.asarray(tensor, np.float64) for tensor in (q, k, v))
    ratio = q.shape[2] // k.shape[2]
    k, v = (np.repeat(tensor, ratio, axis=2) for tensor in (k, v))
    unseen = ~seen.any(1)
    k, v = (np.where(unseen[:, :, None, None], 0.0, tensor) for tensor in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen[:, None], scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(
            np.asarray(sinks, np.float64)[None, :, None, None], (*scores.shape[:3], 1)
        )
        scores = np.concatenate((scores, column), axis=3)
    blind = ~seen.any(2)[:, None, :]  # [B, 1, Lq]
    top = scores.max(3, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + top[..., 0]
    keys = weights[..., : k.shape[1]] / np.where(total == 0, 1.0, total)
    out = np.einsum("bhij,bjhd->bihd", keys, v)
    lse = np.where(np.broadcast_to(blind, lse.shape), -np.inf, lse)
    return out, lse


class PagedBatch:
    """Ragged keys in shuffled pages; what no request owns is NaN, page lists end in wild ids."""

    def __init__(
        self,
        rng: np.random.Generator,
        kv_lens: list[int],
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        spare_pages: int = 2,
    ) -> None:
        used = [-(-length // page_size) for length in kv_lens]
        num_pages = sum(used) + spare_pages
        order = rng.permutation(num_pages)
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        self.k_pages = np.full(shape, np.nan, np.float32)
        self.v_pages = np.full(shape, np.nan, np.float32)
        self.keys, self.values = [], []
        indices: list[int] = []
        indptr = [0]
        taken = 0
        for length, count in zip(kv_lens, used, strict=True):
            pages = order[taken : taken + count]
            taken += count
            k, v = (
                rng.standard_normal((length, num_kv_heads, head_dim), np.float32) for _ in range(2)
            )
            for token in range(length):
                page, offset = pages[token // page_size], token % page_size
                self.k_pages[page, offset], self.v_pages[page, offset] = k[token], v[token]
            self.keys.append(k)
            self.values.append(v)
            indices.extend(int(page) for page in pages)
            indices.append(2**31 - 1)  # past the last used page: must not be read
            indptr.append(len(indices))
        self.kv_indptr = np.array(indptr, np.int32)
        self.kv_indices = np.array(indices, np.int32)
        self.kv_lens = np.array(kv_lens, np.int32)
