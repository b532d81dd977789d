"""The scratch memory of an inference run: one slab, named slices, addresses that never change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from astrai.extension.loader import load

if TYPE_CHECKING:
    from astrai.extension.lib import _ext
else:
    _ext = load()

WorkspaceShape = _ext.WorkspaceShape
WorkspaceLayout = _ext.WorkspaceLayout
WorkspaceSlice = _ext.WorkspaceSlice

__all__ = ["InferenceWorkspace", "WorkspaceLayout", "WorkspaceShape", "WorkspaceSlice"]

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class InferenceWorkspace:
    """One uint8 slab of exactly layout.total_bytes bytes, cut into named torch views.

    A view is an attribute under the name of its slice:
      input_ids, positions, slot_mapping      [max_step_tokens] int64
      qo_indptr, kv_indptr                    [max_batch + 1] int32
      kv_lens                                 [max_batch] int32
      last_rows, seeds, next_ids              [max_batch] int64
      kv_indices                              [max_batch * ceil(max_context / page_size)] int32
      temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty
                                              [max_batch] float32
      top_k                                   [max_batch] int32
      hidden                                  [max_batch, hidden_size], absent when that is 0
      logits                                  [max_batch, vocab_size] float32, likewise
      o_part, ml_part                         [max_batch, num_q_heads, max_splits, head_dim | 2]
                                              float32
    The views stay the same objects, at the same addresses, for the life of the workspace.

    The host writes input_ids, the step metadata and the sampling inputs. On the CPU it writes the
    slab; on a CUDA device it writes `host(name)`, views of a pinned mirror, after `wait_uploaded`,
    and then calls `upload`.
    """

    def __init__(self, shape: WorkspaceShape, device: torch.device | str = "cpu") -> None:
        """Allocate the slab on `device`, the CPU or a CUDA device.

        Raises ValueError for a shape out of range or another kind of device.
        """
        self.layout = _ext.plan_workspace(shape)
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"workspace: device {self.device}; expected cpu or cuda")
        self.slab = _aligned_bytes(self.layout.total_bytes, self.device)
        self.mirror: torch.Tensor | None = None
        self._uploaded: torch.cuda.Event | None = None
        if self.device.type != "cpu":
            mirror_bytes = self.layout.host_inputs[1]
            self.mirror = _aligned_bytes(mirror_bytes, torch.device("cpu"), pinned=True)
        self.core = _ext.InferenceWorkspace(shape, self.slab, self.mirror)
        self._views = {part.name: _view(self.slab, part) for part in self.layout.slices}
        self._host_views = self._views
        if self.mirror is not None:
            end = self.layout.host_inputs[1]
            self._host_views = {
                part.name: _view(self.mirror, part)
                for part in self.layout.slices
                if part.offset + part.bytes <= end
            }

    @staticmethod
    def measure(shape: WorkspaceShape) -> WorkspaceLayout:
        """Slices and total_bytes that a shape needs. Needs no device and allocates no slab.

        Raises ValueError for a size out of range.
        """
        return _ext.plan_workspace(shape)

    @property
    def shape(self) -> WorkspaceShape:
        return self.layout.shape

    @property
    def num_bytes(self) -> int:
        """Size of the slab."""
        return self.layout.total_bytes

    def view(self, name: str) -> torch.Tensor:
        """The slice in the slab. Raises ValueError, listing the known names, for another one."""
        try:
            return self._views[name]
        except KeyError:
            self.layout.find(name)  # words the error
            raise

    def host(self, name: str) -> torch.Tensor:
        """The slice where the host writes it: in the mirror if there is one, else in the slab.

        Raises ValueError for a slice that only the device writes.
        """
        try:
            return self._host_views[name]
        except KeyError:
            self.layout.find(name)
            raise ValueError(
                f"workspace: slice {name!r} has no host copy; "
                f"expected one of {', '.join(self._host_views)}"
            ) from None

    def wait_uploaded(self) -> None:
        """Return once the last upload has read the mirror, so that it may be written again."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, offset: int, num_bytes: int) -> None:
        """Copy a range of the mirror to the same place of the slab, in the current stream.

        Does nothing on the CPU, where the mirror is the slab.
        """
        if self.mirror is None or num_bytes == 0:
            return
        target = self.slab[offset : offset + num_bytes]
        target.copy_(self.mirror[offset : offset + num_bytes], non_blocking=True)
        if self._uploaded is None:
            make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
            self._uploaded = make_event()
        self._uploaded.record()

    def __getattr__(self, name: str) -> torch.Tensor:
        views: dict[str, torch.Tensor] = self.__dict__.get("_views", {})
        if name in views:
            return views[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or slice {name!r}")


def _aligned_bytes(num_bytes: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """uint8 [num_bytes] at an address that is a multiple of the workspace alignment."""
    alignment = _ext.WORKSPACE_ALIGNMENT
    raw = torch.empty(num_bytes + alignment, dtype=torch.uint8, device=device, pin_memory=pinned)
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]


def _view(slab: torch.Tensor, part: WorkspaceSlice) -> torch.Tensor:
    raw = slab[part.offset : part.offset + part.bytes]
    return raw.view(_TORCH_DTYPES[part.dtype]).view(part.shape)
