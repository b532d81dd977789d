"""The boundary: which tensors are taken, which are refused, and that nothing is copied."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from astrai.extension import ops
from astrai.extension.loader import load


def f32(*shape):
    return np.ones(shape, np.float32)


def test_outputs_follow_the_library_of_the_input():
    import torch

    assert isinstance(ops.silu_mul(f32(2, 8)), np.ndarray)
    assert isinstance(ops.silu_mul(torch.ones(2, 8)), torch.Tensor)
    out = torch.empty(2, 4)
    assert ops.silu_mul(f32(2, 8), out=out) is out  # libraries may be mixed
    np.testing.assert_array_equal(out, ops.silu_mul(f32(2, 8)))


def test_out_is_needed_for_other_tensors():
    with pytest.raises(TypeError, match="silu_mul: nothing to return into for a memoryview"):
        ops.silu_mul(memoryview(f32(2, 8)))
    out = f32(2, 4)
    assert ops.silu_mul(memoryview(f32(2, 8)), out=out) is out


def test_views_are_not_copied():
    import torch

    base = torch.zeros(4, 10)
    ops.silu_mul(torch.ones(2, 8), out=base[1::2, 3:7])
    assert base.count_nonzero() == 8
    array = np.zeros((4, 10), np.float32)
    ops.silu_mul(f32(2, 8), out=array[::-2, 3:7])
    assert np.count_nonzero(array[[1, 3], 3:7]) == np.count_nonzero(array) == 8


def test_read_only_memory_is_an_input_but_no_output():
    frozen = f32(2, 8)
    frozen.setflags(write=False)
    ops.silu_mul(frozen)
    target = f32(2, 4)
    target.setflags(write=False)
    with pytest.raises(ValueError, match="silu_mul: out is read-only; expected writable memory"):
        ops.silu_mul(frozen, out=target)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda torch: torch.ones(2, 8, dtype=torch.float64), "dtype float64; expected one of"),
        (lambda torch: np.ones((2, 8), np.float64), "dtype float64; expected one of float32"),
        (lambda torch: torch.ones(2, 8, dtype=torch.complex64), "complex64"),
        (lambda torch: torch.ones(2, 8).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda torch: torch.ones(2, 8).to_sparse(), "expected a dense CPU or CUDA tensor"),
        (lambda torch: torch.ones(2, 8, device="meta"), "expected a dense CPU or CUDA tensor"),
        (lambda torch: f32(2, 8).astype(">f4"), "native byte order"),
        (lambda torch: torch.ones([1] * 7), "has 7 dimensions; expected 0 to 6"),
        (lambda torch: f32(2, 16)[:, ::2], "stride"),
    ],
)
def test_tensors_that_no_kernel_can_read(make, message):
    import torch

    out = f32(2, 4)
    with pytest.raises(ValueError, match=message) as caught:
        ops.silu_mul(make(torch), out=out)
    assert str(caught.value).startswith("silu_mul: gate_up ")
    assert "\n" not in str(caught.value)
    assert (out == 1).all()


def test_what_is_no_tensor_is_a_type_error():
    for value in ([1.0, 2.0], "text", 3, None):
        with pytest.raises(TypeError):
            ops.silu_mul(value, out=f32(2, 4))
    with pytest.raises(TypeError, match="silu_mul: gate_up is a list; expected a tensor"):
        ops.silu_mul([1.0, 2.0], out=f32(2, 4))
    with pytest.raises(TypeError, match="linear: x is a list"):
        ops.linear([1.0], f32(2, 2))


def test_a_gradient_is_never_lost_silently():
    import torch

    x, weight = torch.ones(2, 8), torch.nn.Parameter(torch.ones(3, 8))
    with pytest.raises(ValueError, match="linear: weight requires grad while gradients are"):
        ops.linear(x, weight)
    with torch.no_grad():
        assert ops.linear(x, weight).tolist() == [[8.0] * 3] * 2
    with torch.inference_mode():
        assert ops.linear(x, weight).tolist() == [[8.0] * 3] * 2
    assert ops.linear(x, weight.detach()).tolist() == [[8.0] * 3] * 2


def test_tensors_without_the_fast_table_go_through_dlpack():
    """As with a torch that has no exchange table: only __dlpack__ is there."""
    import torch

    class Wrapped:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    base = torch.zeros(4, 10, dtype=torch.bfloat16)
    gate_up = torch.randn(2, 8).bfloat16()
    ops.silu_mul(Wrapped(gate_up), out=Wrapped(base[1::2, 3:7]))
    assert base[1::2, 3:7].equal(ops.silu_mul(gate_up))
    assert base.count_nonzero() == 8


def test_streams():
    """A stream is a number or None; the CPU has none, whatever the number."""
    expected = ops.silu_mul(f32(2, 8))
    for stream in (None, 0, 2**40):
        np.testing.assert_array_equal(ops.silu_mul(f32(2, 8), stream=stream), expected)
    for stream in ("0", 1.5, object()):
        with pytest.raises(TypeError, match="silu_mul: stream is "):
            ops.silu_mul(f32(2, 8), stream=stream)


def test_kernels_run_from_many_threads():
    """Kernels let go of the interpreter; results do not mix."""
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal((64, 256), np.float32) for _ in range(4)]
    weight = generator.standard_normal((256, 256), np.float32)
    expected = [ops.linear(x, weight) for x in inputs]
    failures: list[int] = []

    def work(index):
        for _ in range(50):
            if not np.array_equal(ops.linear(inputs[index], weight), expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_counters_count_launches_and_no_steady_allocation():
    x, weight, out = f32(4, 64), f32(64), f32(4, 64)
    ops.rms_norm(x, weight, eps=1e-5, out=out)
    load().reset_counters()
    assert set(load().counters().values()) == {0}
    for _ in range(10):
        ops.rms_norm(x, weight, eps=1e-5, out=out)
    counted = load().counters()
    assert counted["launches"] == 10
    assert counted["host_allocations"] == counted["device_allocations"] == 0
    assert counted["synchronizations"] == 0


def test_thread_count_is_checked_and_used():
    before = load().num_threads()
    try:
        for threads in (1, 3):
            load().set_num_threads(threads)
            assert load().num_threads() == threads
            x = np.arange(64 * 300, dtype=np.float32).reshape(300, 64)
            np.testing.assert_allclose(ops.linear(x, np.eye(64, dtype=np.float32)), x)
        for threads in (0, -1, 1025):
            with pytest.raises(ValueError, match=r"expected .*1.*1024"):
                load().set_num_threads(threads)
    finally:
        load().set_num_threads(before)


def test_instruction_sets():
    ext = load()
    assert ext.cpu_isa() in ext.supported_isas()
    assert set(ext.supported_isas()) <= set(ext.compiled_isas())
    assert "baseline" in ext.supported_isas()
    before = ext.cpu_isa()
    with pytest.raises(ValueError, match="sse9"):
        ext.force_isa("sse9")
    for name in set(ext.compiled_isas()) - set(ext.supported_isas()):
        with pytest.raises(ValueError, match=name):
            ext.force_isa(name)
    assert ext.cpu_isa() == before


def test_cuda_facts_of_a_build_without_cuda():
    if load().built_with_cuda():
        pytest.skip("this build was configured with CUDA")
    assert load().cuda_device_count() == 0
    with pytest.raises(RuntimeError, match="no CUDA"):
        load().cuda_device_facts(0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 1.5}, TypeError, "window is 1.5, a float; expected an int"),
        ({"window": True}, TypeError, "window is True, a bool; expected an int"),
        ({"window": 2**70}, ValueError, "window is 1180591620717411303424; expected an int of 64"),
        ({"softcap": "a"}, TypeError, "softcap is 'a', a str; expected a number"),
        ({"softcap": False}, TypeError, "softcap is False, a bool; expected a number"),
        ({"scale": "a"}, TypeError, "scale is 'a', a str; expected a number"),
        ({"causal_offset": 0.0}, TypeError, "causal_offset is 0.0, a float; expected an int"),
        ({"stream": -1}, ValueError, "stream is -1; expected a cudaStream_t as an int, or None"),
        ({"stream": "0"}, TypeError, "stream is '0', a str; expected an int"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind_are_named(options, error, message):
    q = f32(1, 1, 2, 32)
    out = np.full_like(q, 7)
    with pytest.raises(error) as caught:
        ops.attn_decode(q, f32(1, 3, 1, 32), f32(1, 3, 1, 32), out=out, **options)
    assert str(caught.value).startswith(f"attn_decode: {message}")
    assert (out == 7).all()


def test_flags_and_numbers_of_the_layers_are_named():
    with pytest.raises(TypeError, match="rotary: interleaved is 5, a int; expected True or False"):
        ops.rotary(f32(1, 1, 8), None, np.zeros(1, np.int64), f32(4, 8), interleaved=5)
    with pytest.raises(TypeError, match="rms_norm: eps is 'x', a str; expected a number"):
        ops.rms_norm(f32(2, 8), f32(8), eps="x")


def test_numbers_of_other_libraries_are_numbers():
    q, k = f32(1, 1, 2, 32), f32(1, 3, 1, 32)
    expected = ops.attn_decode(q, k, k.copy(), window=2, scale=0.5)
    found = ops.attn_decode(q, k, k.copy(), window=np.int32(2), scale=np.float32(0.5))
    np.testing.assert_array_equal(found, expected)
