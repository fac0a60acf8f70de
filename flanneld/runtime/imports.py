"""Taking less of a library than importing it would: start-up time and memory are features here."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def package_without_init(name: str) -> None:
    """Register a package without running its ``__init__``: its parts can then be imported one by one."""
    if name in sys.modules:
        return
    spec = _find(name)
    if not isinstance(spec, ModuleSpec) or spec.submodule_search_locations is None:
        return
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    package.__file__ = spec.origin
    sys.modules[name] = package


def _find(name: str) -> ModuleSpec | None:
    """As ``find_spec``, which would import the package around a name."""
    around, _, _ = name.rpartition(".")
    if not around:
        return find_spec(name)
    outer = _find(around)
    return PathFinder.find_spec(name, outer.submodule_search_locations) if outer else None


def lazily(name: str) -> None:
    """Let a module be loaded when something in it is first used, if ever.

    ``importlib.util.LazyLoader`` cannot serve: up to Python 3.13 the import statement itself sets it off.
    """
    if name in sys.modules:
        return
    module = sys.modules[name] = _Deferred(name)
    package, _, child = name.rpartition(".")
    if package:
        setattr(import_module(package), child, module)


class _Deferred(ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system looks for some that may be missing
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), attribute)
