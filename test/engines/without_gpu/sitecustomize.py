"""Stand-ins for packages that SGLang imports at its top and that have no build without CUDA.

Python imports this file at its start if its folder is in PYTHONPATH, also in the processes that SGLang
starts. Whatever is asked of these packages is a class that raises when it is called.
"""

import importlib.abc
import importlib.machinery
import sys
import types

MISSING = ("sgl_kernel", "torchvision")


class AnyName(type):
    """The type of a class that has every attribute and cannot be made an object of."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} has no build without CUDA")


class Absent(types.ModuleType):
    """A module that has every name."""

    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {"__module__": self.__name__})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the missing packages."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
