"""What stands for torchvision, whose build in the package index is for CUDA? Modules of any name, with any names in
them: SGLang imports them at its start, and a model of text uses none."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.0"
__path__: list[str] = []


class Unusable(type):
    """A class of which any attribute is such a class as well; an object of one is refused."""

    def __getattr__(cls, name: str) -> Any:
        return named(name)

    def __call__(cls, *arguments: object, **keywords: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} of torchvision has none: see {__file__}")


def named(name: str) -> Any:
    """Return what an import of this name gets.

    Raises:
        AttributeError: it is one of Python's own names, by which a module says what it has.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return Unusable(name, (), {})


__getattr__ = named


class Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below this one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = named


sys.meta_path.append(Below())
