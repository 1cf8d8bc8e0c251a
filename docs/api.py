"""Writes an API reference from the docstrings of all public names into build/api. `make docs` runs it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pdoc

import ftcoord

OUTPUT = Path(__file__).parents[1] / "build" / "api"


def load(module: ModuleType) -> None:
    """Load public names, which ftcoord does at their first use: pdoc looks only at what a module already has."""
    for name in module.__all__:
        value = getattr(module, name)
        setattr(module, name, value)
        if isinstance(value, ModuleType) and hasattr(value, "__all__"):
            load(value)


if __name__ == "__main__":
    load(ftcoord)
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("ftcoord", output_directory=OUTPUT)
    print(f"open {OUTPUT / 'index.html'}")
