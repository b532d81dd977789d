"""Call the attention kernel on numpy arrays, without torch and without a model."""

import numpy as np

from astrai.extension import ops

rng = np.random.default_rng(0)
# 2 requests, 5 queries, 9 keys, 6 query heads over 2 key/value heads, head dim 64
q = rng.standard_normal((2, 5, 6, 64), dtype=np.float32)
k = rng.standard_normal((2, 9, 2, 64), dtype=np.float32)
v = rng.standard_normal((2, 9, 2, 64), dtype=np.float32)

# The queries are the last five of the nine positions; each sees at most four keys.
out, lse = ops.attn_prefill(q, k, v, causal_offset=4, window=4, return_lse=True)

scores = np.einsum("bihgd,bjhd->bhgij", q.reshape(2, 5, 2, 3, 64), k) / 8.0
i, j = np.arange(5)[:, None] + 4, np.arange(9)[None, :]
scores = np.where((j <= i) & (j > i - 4), scores, -np.inf)
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
expected = np.einsum("bhgij,bjhd->bihgd", weights, v).reshape(2, 5, 6, 64)

print("out", np.asarray(out).shape, "lse", np.asarray(lse).shape)
print("largest difference from numpy:", float(np.abs(np.asarray(out) - expected).max()))
