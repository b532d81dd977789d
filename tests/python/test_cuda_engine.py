"""Whole models and the engine on a CUDA device, through the CUDA attention backend."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import random

import pytest

from astrai.extension.loader import load
from astrai.sampling import SamplingParams

pytestmark = pytest.mark.gpu


def greedy(max_tokens=32, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def prompts_of(*lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(4, 267) for _ in range(length)] for length in lengths]


def tokens(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def moved(model, dtype=None):
    """A LoadedModel with its weights copied to the GPU."""
    weights = copy.deepcopy(model.model).to("cuda", dtype)
    name = str(weights.embedding.weight.dtype).removeprefix("torch.")
    config = dataclasses.replace(model.config, dtype=name)
    weights.config = config
    return dataclasses.replace(model, model=weights, config=config)


@pytest.fixture(scope="module")
def wide_model(tiny_model):
    """SmolLM2's shape in small: 9 query heads on 3 KV heads of width 64, tied embedding, fp32."""
    import torch

    from astrai.models.llama import LlamaForCausalLM

    config = dataclasses.replace(
        tiny_model.config,
        hidden_size=576,
        intermediate_size=512,
        num_layers=3,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=2048,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return dataclasses.replace(tiny_model, model=model, config=config)


@pytest.fixture
def make_pair(make_llm):
    """Engines over one model on the CPU and on the GPU."""
    from astrai import LLM
    from engine_checks import check_empty

    made = []

    def make(model, **options):
        options.setdefault("num_pages", 256)
        for place in (model, moved(model)):
            made.append(LLM(place, **options))
        return made[-2:]

    yield make
    for llm in made:
        check_empty(llm)
        llm.close()


@pytest.mark.parametrize("attn_backend", [None, "cuda", "torch_native"])
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 7, "page_size": 1}])
def test_greedy_tokens_are_those_of_the_cpu(make_pair, tiny_model, attn_backend, options):
    prompts = prompts_of(1, 3, 20, 37, 150)
    on_cpu, on_gpu = make_pair(tiny_model, num_pages=2048, **options)
    on_gpu._core._executor._backend = attn_backend
    assert tokens(on_gpu.generate(prompts, greedy())) == tokens(on_cpu.generate(prompts, greedy()))


def test_greedy_tokens_of_a_wider_model_and_longer_contexts(make_pair, wide_model, caplog):
    prompts = prompts_of(5, 300, 700, 64)
    on_cpu, on_gpu = make_pair(wide_model)
    with caplog.at_level(logging.WARNING, "astrai.attention"):
        got = tokens(on_gpu.generate(prompts, greedy(48)))
    assert caplog.records == [], "attention must run on the CUDA kernels"
    assert got == tokens(on_cpu.generate(prompts, greedy(48)))
    assert len({tuple(sample[0]) for sample in got}) == len(prompts)


def test_the_models_logits_are_those_of_the_cpu(wide_model):
    """Dense, without and with gradients."""
    import torch

    ids = torch.tensor(prompts_of(33, 33))
    on_gpu = moved(wide_model).model
    with torch.no_grad():
        wanted = wide_model.model.compute_logits(wide_model.model(ids))
        load().reset_counters()
        got = on_gpu.compute_logits(on_gpu(ids.cuda()))
        assert load().counters()["launches"] >= 2 * wide_model.config.num_layers
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)
    on_gpu.requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(
        on_gpu.compute_logits(on_gpu(ids.cuda())).flatten(0, 1), ids.cuda().flatten()
    )
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in on_gpu.parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_stay_near_the_cpus_logits(wide_model, dtype):
    import torch

    from astrai.kv_cache import KVCache

    ids = torch.tensor(prompts_of(90)[0])
    kind = getattr(torch, dtype)
    wanted = wide_model.model.compute_logits(wide_model.model(ids))
    model = moved(wide_model, kind).model
    kv = KVCache(model.config, 16, 16, kind, "cuda", 2, 128, 96)
    kv.pool.add_task(0)
    rows = []
    with torch.no_grad():
        for chunk in (ids[:80], ids[80:89], ids[89:]):
            assert kv.pool.try_reserve(0, len(chunk))
            kv.bind([0], [len(chunk)])
            rows.append(model.compute_logits(model(chunk.cuda(), None, kv)).cpu())
            kv.pool.append(0, len(chunk))
    error = (torch.cat(rows) - wanted).norm() / wanted.norm()
    assert error < {"float16": 1e-2, "bfloat16": 6e-2}[dtype]


def test_every_sampling_option_runs_and_repeats(make_pair, tiny_model):
    everything = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        logit_bias={7: -2.0},
        min_tokens=4,
        bad_words=["e", "th", "\x05\x06"],
        logprobs=3,
        prompt_logprobs=2,
        n=2,
        best_of=4,
        seed=3,
        max_tokens=16,
    )
    limited = SamplingParams(seed=6, max_tokens=16, allowed_token_ids=range(40, 90), top_k=60)
    params = [everything, greedy(16, logprobs=2), SamplingParams(seed=5, max_tokens=16), limited]
    prompts = prompts_of(4, 9, 30, 6)
    on_cpu, llm = make_pair(tiny_model)
    first = llm.generate(prompts, params)
    (expected,) = on_cpu.generate(prompts[:1], everything)
    pairs = zip(first[0].prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True)
    assert all(found == pytest.approx(entry, abs=1e-3) for found, entry in pairs)
    assert set(first[3].outputs[0].token_ids) <= set(range(40, 90))
    assert tokens(first) == tokens(llm.generate(prompts, params))
    assert all(sample.token_ids for output in first for sample in output.outputs)


def test_preempted_requests_give_what_a_large_pool_gives(make_pair, tiny_model):
    prompts = prompts_of(3, 3, 20, 37)
    large, small = (
        make_pair(tiny_model)[1],
        make_pair(tiny_model, num_pages=7, max_step_tokens=8)[1],
    )
    wanted = tokens(large.generate(prompts, greedy(40)))
    assert tokens(small.generate(prompts, greedy(40))) == wanted
    assert small.stats().preemptions > 0


def test_aborts_at_any_moment_leak_nothing_and_leave_others_alone(make_pair, tiny_model):
    _, llm = make_pair(tiny_model, num_pages=64, max_step_tokens=8)
    prompt, other = prompts_of(20, 30)
    wanted = tokens(llm.generate([prompt], greedy(24)))[0][0]
    rng = random.Random(0)
    for _ in range(8):
        own = llm.stream(prompt, greedy(24))
        doomed = [llm.stream(other, greedy(40, n=2)) for _ in range(3)]
        lifetimes = [rng.randrange(1, 30) for _ in doomed]
        seen = []
        for event in own:
            seen += event.token_ids
            for stream, lifetime in zip(doomed, lifetimes, strict=True):
                if len(seen) < lifetime:
                    next(stream, None)
                else:
                    stream.close()
        for stream in doomed:
            stream.close()
        assert seen == wanted
        assert llm.stats().free_pages == 64


def test_a_closed_engine_gives_its_memory_back(tiny_model):
    import torch

    from astrai import LLM

    def run():
        llm = LLM(moved(tiny_model), num_pages=2048)
        llm.generate(prompts_of(9), greedy(4))
        llm.close()

    run()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_auto_takes_the_gpu(monkeypatch):
    from astrai.loading.load import resolve_device

    monkeypatch.delenv("ASTRAI_DEVICE")
    assert resolve_device("auto").type == "cuda"
