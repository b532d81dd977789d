"""Choosing a backend: automatic with logged reasons, explicit and strict."""

from __future__ import annotations

import contextvars
import logging
import threading

import pytest


@pytest.fixture
def registry(monkeypatch):
    from astrai.attention import registry as module

    monkeypatch.delenv("ASTRAI_ATTN_BACKEND", raising=False)
    monkeypatch.setattr(module, "_logged", set())
    return module


@pytest.fixture
def torch():
    import torch

    return torch


@pytest.fixture
def cuda_machine(monkeypatch):
    """A machine as the CUDA backend sees it: reasons by device index, None = kernels run there."""
    import torch

    from astrai.attention import cuda

    def build(*reasons, torch_sees_devices=True):
        monkeypatch.setattr(cuda, "cuda_kernels_reason", lambda index: reasons[index])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees_devices)
        cuda._unavailable_reason.cache_clear()

    yield build
    cuda._unavailable_reason.cache_clear()


def test_every_name_is_registered_and_describes_itself(registry):
    kinds = set(registry.ATTN_BACKEND)
    assert {kind.value for kind in kinds} == {"torch_native", "cpu", "cuda", "flash"}
    assert set(registry._BACKEND_REGISTRY) == kinds
    for kind, backend in registry._BACKEND_REGISTRY.items():
        assert backend.kind is kind


def test_automatic_choice_on_the_cpu(registry, torch, caplog):
    with caplog.at_level(logging.WARNING, "astrai.attention"):
        backend = registry.select_backend("cpu", torch.bfloat16, 64)
    assert backend.kind is registry.ATTN_BACKEND.CPU
    assert backend is registry.select_backend(torch.device("cpu"), torch.float32, 128)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [("float32", 48, "head_dim 48; it serves 32, 64, 80"), ("float64", 64, "dtype float64")],
)
def test_fallback_logs_one_reason_once(registry, torch, caplog, dtype, head_dim, reason):
    with caplog.at_level(logging.WARNING, "astrai.attention"):
        for _ in range(3):
            backend = registry.select_backend("cpu", getattr(torch, dtype), head_dim)
            assert backend.kind is registry.ATTN_BACKEND.TORCH_NATIVE
    assert len(caplog.records) == 1
    assert "cpu is passed over: " + reason in caplog.text


def test_cuda_tensors_fall_back_with_the_reason_of_each_backend(
    registry, torch, caplog, cuda_machine
):
    cuda_machine("this build has no code for a Toaster 9000")
    with caplog.at_level(logging.WARNING, "astrai.attention"):
        for _ in range(3):
            backend = registry.select_backend("cuda", torch.float32, 64)
            assert backend.kind is registry.ATTN_BACKEND.TORCH_NATIVE
    assert len(caplog.records) == 2
    assert "cuda is passed over: this build has no code for a Toaster 9000" in caplog.text
    assert "flash is passed over: dtype float32" in caplog.text


def test_each_device_is_judged_by_its_own_architecture(registry, torch, caplog, cuda_machine):
    cuda_machine(None, "this build has no code for a Toaster 9000")
    kinds = registry.ATTN_BACKEND
    with caplog.at_level(logging.WARNING, "astrai.attention"):
        for device in ("cuda", "cuda:0"):
            assert registry.select_backend(device, torch.bfloat16, 64).kind is kinds.CUDA
        assert caplog.records == []
        assert registry.select_backend("cuda:1", torch.float32, 64).kind is kinds.TORCH_NATIVE
    assert "Toaster 9000" in caplog.text
    with registry.attn_backend("cuda"):
        assert registry.select_backend("cuda:0", torch.float32, 64).kind is kinds.CUDA
        with pytest.raises(RuntimeError, match="Toaster 9000"):
            registry.select_backend("cuda:1", torch.float32, 64)
        with pytest.raises(ValueError, match="head_dim 48; it serves 32"):
            registry.select_backend("cuda:0", torch.float32, 48)


def test_explicit_cuda_names_what_is_missing(registry, torch, cuda_machine):
    cuda_machine("the driver reports no CUDA device")
    with (
        registry.attn_backend("cuda"),
        pytest.raises(RuntimeError, match=r"cuda, chosen .*: the driver reports no CUDA device"),
    ):
        registry.select_backend("cuda", torch.float32, 64)


def test_cuda_kernels_need_a_torch_that_sees_the_device(registry, torch, cuda_machine):
    cuda_machine(None, torch_sees_devices=False)
    assert "sees no CUDA device" in registry.CudaBackend.unavailable_reason("cuda:0")


def test_reason_of_this_build(registry):
    """Without a stand-in: whatever this build and this machine are, the reason says it."""
    from astrai.extension.loader import load

    ext = load()
    reason = registry.CudaBackend.unavailable_reason("cuda:0")
    assert (ext.cuda_architectures() != []) == ext.built_with_cuda()
    if not ext.built_with_cuda():
        assert "configured without CUDA" in reason
    elif ext.cuda_device_count() == 0:
        assert "the driver reports no CUDA device" in reason
    assert "no CUDA device" in ext.cuda_unavailable_reason(99) or not ext.built_with_cuda()


def test_other_devices_are_served_by_torch(registry, torch, caplog):
    with caplog.at_level(logging.WARNING, "astrai.attention"):
        backend = registry.select_backend("meta", torch.float32, 64)
    assert backend.kind is registry.ATTN_BACKEND.TORCH_NATIVE
    assert caplog.records == []
    with pytest.raises(ValueError, match=r"no backend serves .*int32"):
        registry.select_backend("cpu", torch.int32, 64)


def test_explicit_choice_nests_and_ends(registry, torch):
    kinds = registry.ATTN_BACKEND

    def chosen():
        return registry.select_backend("cpu", torch.float32, 64).kind

    with registry.attn_backend("torch_native") as outer:
        assert outer is chosen() is kinds.TORCH_NATIVE
        with registry.attn_backend(kinds.CPU):
            assert chosen() is kinds.CPU
        assert chosen() is kinds.TORCH_NATIVE
        with pytest.raises(KeyError), registry.attn_backend("cpu"):
            raise KeyError
        assert chosen() is kinds.TORCH_NATIVE
    assert registry.explicit_choice() is None


def test_explicit_choice_belongs_to_its_context(registry):
    seen = []
    with registry.attn_backend("torch_native"):
        inherited = contextvars.copy_context()
        for run in (registry.explicit_choice, lambda: inherited.run(registry.explicit_choice)):
            thread = threading.Thread(target=lambda run=run: seen.append(run()))
            thread.start()
            thread.join()
    assert seen == [None, registry.ATTN_BACKEND.TORCH_NATIVE]


def test_unknown_names(registry):
    known = "torch_native, cpu, cuda, flash"
    with (
        pytest.raises(ValueError, match=f"attn_backend: 'gpu'; expected one of {known}"),
        registry.attn_backend("gpu"),
    ):
        pass
    with pytest.raises(TypeError, match="expected a name"), registry.attn_backend(3):
        pass


def test_explicit_choice_that_cannot_serve_says_why(registry, torch):
    with registry.attn_backend("cpu"):
        with pytest.raises(
            ValueError, match=r"cpu, chosen explicitly, .*head_dim 48; it serves 32"
        ):
            registry.select_backend("cpu", torch.float32, 48)
        with pytest.raises(ValueError, match="device cuda; it serves cpu"):
            registry.select_backend("cuda", torch.float32, 64)
    with (
        registry.attn_backend("cuda"),
        pytest.raises(ValueError, match="device cpu; it serves cuda"),
    ):
        registry.select_backend("cpu", torch.float32, 64)


def test_environment_sets_the_default(registry, torch, monkeypatch):
    kinds = registry.ATTN_BACKEND
    monkeypatch.setenv("ASTRAI_ATTN_BACKEND", " Torch_Native ")
    assert registry.select_backend("cpu", torch.float32, 64).kind is kinds.TORCH_NATIVE
    with registry.attn_backend("cpu"):
        assert registry.select_backend("cpu", torch.float32, 64).kind is kinds.CPU
    monkeypatch.setenv("ASTRAI_ATTN_BACKEND", "")
    assert registry.explicit_choice() is None
    monkeypatch.setenv("ASTRAI_ATTN_BACKEND", "gpu")
    message = "ASTRAI_ATTN_BACKEND: 'gpu'; expected one of torch_native, cpu, cuda, flash"
    with pytest.raises(ValueError, match=message):
        registry.select_backend("cpu", torch.float32, 64)
