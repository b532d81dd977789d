"""Models from files: Hugging Face directories, GGUF files and aliases."""

from astrai.loading.aliases import ALIASES, Alias
from astrai.loading.load import LoadedModel, load_model, resolve_source

__all__ = ["ALIASES", "Alias", "LoadedModel", "load_model", "resolve_source"]
