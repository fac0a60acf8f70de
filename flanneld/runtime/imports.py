"""Lazy imports of packages that load more than we use, for start time and memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # takes 6 ms

_LOCK = RLock()
#: Submodules to import at once, by the name of the deferred package.
_DEFERRED: dict[str, tuple[str, ...]] = {}


def defer(name: str, *parts: str) -> None:
    """Defer running a module's code until a missing attribute of it is used.

    Submodules of a deferred package are imported as usual. Those in ``parts`` are imported with it, so that
    ``from package import part`` does not run the package's code.

    ``importlib.util.LazyLoader`` is no alternative: up to Python 3.13 the import statement itself runs the
    code.
    """
    if not _DEFERRED:
        sys.meta_path.insert(0, _Finder())
    _DEFERRED[name] = parts


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _DEFERRED else None
        if spec and spec.loader:
            spec.loader = cast("Loader", _LazyLoader(spec.loader))
        return spec


class _LazyLoader:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred
        for part in _DEFERRED[module.__name__]:
            import_module(f"{module.__name__}.{part}")

    def run(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:  # as without memory or file descriptors: the next use tries again
            module.__loader__ = cast("Loader", self)
            raise
        # Last, so that another thread waits for the end of the code instead of missing an attribute.
        module.__class__ = ModuleType


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # the import system reads it, and a plain module has none
            raise AttributeError(name)
        with _LOCK:
            if isinstance(self.__loader__, _LazyLoader):
                self.__loader__.run(self)
        if type(self) is _Deferred:  # its code runs, in this thread
            raise AttributeError(f"module {self.__name__} has no attribute {name}", name=name, obj=self)
        return getattr(self, name)
