"""Modules that stand in for packages that are not here."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._triton import has_triton_package

from memplan.capturing.patches.imports import WrappedLoader
from memplan.capturing.recording.context import shown_path, source_of
from memplan.capturing.standins.guarded import importing_frame, is_guarded
from memplan.types.errors import CaptureError, UsageError
from memplan.types.installed import is_installed

PACKAGES = Path(__file__).parent / "packages"

VERSIONS = {
    "apex": "0.1",
    "bitsandbytes": "0.50.2",
    "causal_conv1d": "1.7.0",
    "deepspeed": "0.19.8",
    "flash_attn": "2.8.3",
    "flash_attn_interface": "3.0.0",
    "liger_kernel": "0.8.5",
    "mamba_ssm": "2.3.2",
    "transformer_engine": "2.20.2",
    "triton": "3.7.1",
    "vllm": "0.27.1",
    "xformers": "0.0.35",
}
"""Packages with stand-ins, and the version whose memory each follows."""
EARLIER = {"bitsandbytes": "0.42.0"}
"""Versions that keep something else, and that `--with NAME==VERSION` takes."""
_asked: dict[str, str] = {}
"""Versions that the running capture was asked for."""
DISTRIBUTIONS = {"flash_attn_interface": "flash_attn_3"}
"""Packages that are installed under another name."""
INSTALL = {
    "causal_conv1d": "install causal-conv1d's Python here: CAUSAL_CONV1D_FORCE_BUILD=TRUE "
    "CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation causal-conv1d",
    "deepspeed": "install DeepSpeed here (DS_BUILD_OPS=0 pip install deepspeed): its own Python "
    "runs, without its kernels",
    "mamba_ssm": "install mamba-ssm's Python here: MAMBA_FORCE_BUILD=TRUE "
    "MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm, and einops",
    "transformer_engine": "install Transformer Engine's Python into a folder on PYTHONPATH (pip "
    "install --target FOLDER transformer-engine einops pydantic): its compiled part is not needed, "
    "but other packages cannot import it without memplan",
    "liger_kernel": "install Liger-Kernel here (pip install --no-deps liger-kernel): its own "
    "Python runs, without its kernels",
    "triton": "install Triton here (pip install triton): it needs no GPU",
}
_PROBING = ("transformers.utils.import_utils", "peft.import_utils", "accelerate.utils.imports")
EXTENSIONS = {
    "causal_conv1d_cuda": "causal_conv1d",
    "selective_scan_cuda": "mamba_ssm",
    "flash_attn_2_cuda": "flash_attn",
    "transformer_engine_torch": "transformer_engine",
    "amp_C": "apex",
    "fused_weight_gradient_mlp_cuda": "apex",
    "generic_scaled_masked_softmax_cuda": "apex",
    "scaled_masked_softmax_cuda": "apex",
    "scaled_softmax_cuda": "apex",
    "scaled_upper_triang_masked_softmax_cuda": "apex",
}
"""Compiled modules, and the package that each belongs to: its Python runs, they do not."""


def version_of(package: str) -> str:
    """The version that a stand-in follows in the running capture."""
    return _asked.get(package, VERSIONS[package])


def known_version(package: str, version: str) -> str:
    """The version of a stand-in that `version`, perhaps cut short, names. Raises UsageError for one
    that is not followed."""
    tables = (VERSIONS, EARLIER) if has_stand_in(package) else ()
    known = [table[package] for table in tables if package in table]
    for candidate in known:
        if candidate == version or candidate.startswith(version + "."):
            return candidate
    raise UsageError(
        f"memplan has no stand-in for {package} {version}",
        f"it follows {' and '.join(known)}" if known else "leave the version out",
    )


def has_stand_in(package: str) -> bool:
    """Whether it is stood in for, where others are only made to run without their kernels."""
    return _in_packages(package) is not None


def _install(package: str) -> str:
    name = DISTRIBUTIONS.get(package, package)
    return INSTALL.get(package, f"install {name} here if it imports without a GPU")


def advice(module: str) -> str:
    """What to try where a module is missing: the one place that knows what `--with` takes."""
    package, _, part = module.partition(".")
    if package in VERSIONS:
        name = DISTRIBUTIONS.get(package, package)
        stand_in = not part and has_stand_in(package)
        return f"--with {name}; or {_install(package)}" if stand_in else _install(package)
    return (
        f"install {package} beside memplan; where only the machine with the GPU can have it, say "
        "what it takes in a file of rules: --with RULES.py (docs/packages.md)"
    )


class Unknown:
    """A name of an absent package that no stand-in and no rule knows: importing it is harmless,
    using it ends the capture."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def _refuse(self) -> CaptureError:
        where = source_of(importing_frame()[0])
        package = self.__name__.partition(".")[0]
        return CaptureError(
            f"{where or 'the script'}: {self.__name__} cannot be captured: {package} is not "
            "installed here, and nothing says what it takes of the GPU's memory",
            f"{_install(package)}; or say it with memplan.register_rule({self.__name__!r})",
        )

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise self._refuse()

    def __mro_entries__(self, _bases: Any) -> Any:
        raise self._refuse()

    def __instancecheck__(self, _instance: object) -> bool:
        return False  # nothing was ever made of it

    def __or__(self, _other: Any) -> Any:
        return Any  # in an annotation

    __ror__ = __or__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self.__name__}.{name}")


class DeviceName(Unknown):
    """A name of code for the device that host code may say, call, decorate with, subscript and
    derive from: kernels are never compiled, so nothing comes of it. It has no value: what host code
    computes with it, and what is to be done to a tensor, is refused."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(item, torch.Tensor) for item in (*args, *kwargs.values())):
            raise self._refuse()
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | type):
            return args[0]  # decorated
        return DeviceName(f"{self.__name__}()")

    def __mro_entries__(self, _bases: Any) -> Any:
        return ()

    def __getitem__(self, _key: Any) -> Any:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _no_value(self, *_args: Any) -> Any:
        raise self._refuse()

    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = _no_value
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = _no_value
    __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = __enter__ = __exit__ = _no_value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _device_name(self.__name__, name)


def _device_name(module: str, name: str) -> Any:
    """A name that no file of the stand-in has. Triton names things where they are defined and in
    the packages above: what one of those has is meant."""
    above = module
    while above := above.rpartition(".")[0]:
        if name in (known := vars(sys.modules.get(above, object))):
            return known[name]
    if name.endswith("Error"):
        return type(name, (Exception,), {"__module__": module})
    return DeviceName(f"{module}.{name}")


class StandInFinder:
    """Comes last among the finders: serves a stand-in where an import would end the program.

    A guarded import, and a probe for a specification or a version, sees what is installed, unless
    the package is `wanted`, or has been served already.
    """

    def __init__(
        self,
        wanted: Iterable[str],
        ruled: Callable[[], Iterable[str]],
        versions: dict[str, str] | None = None,
    ) -> None:
        self.wanted = {name.replace("-", "_") for name in wanted}
        self.versions = versions or {}
        """Versions of packages for which not the newest one is wanted."""
        self.served: set[str] = set()
        self.done_without: dict[str, str] = {}
        """Packages that the program's own code looked for in vain, and where."""
        self._ruled = ruled
        self._modules: list[str] = []
        self._extensions = _Extensions(self)

    def start(self) -> None:
        """Serve from now on."""
        _asked.update(self.versions)
        sys.meta_path.append(self)
        sys.meta_path.insert(0, self._extensions)

    def stop(self) -> None:
        """Serve no more, and take back what was served."""
        _asked.clear()
        for finder in (self, self._extensions):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for name in self._modules:
            sys.modules.pop(name, None)
        self._modules.clear()

    def want(self, package: str) -> None:
        """From now on a package that is not installed seems to be."""
        if package not in self.wanted and not installed(package):
            self.wanted.add(package)
            forget_probes()

    def stands_in(self, package: str) -> bool:
        """Whether a package is stood in for, or would be by the import that is running."""
        if package in self.served or package in self.wanted:
            return True
        frame, probe = importing_frame()
        if probe or is_guarded(frame):
            self._note(package, frame)
            return False
        return True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import protocol."""
        package = fullname.partition(".")[0]
        rules = {name for name in self._ruled() if name.startswith(package + ".")}
        if package not in VERSIONS and not rules:
            return None
        if "." in fullname and package not in self.served:
            return None  # installed, but without this module
        frame, probe = importing_frame()
        if fullname == "triton" and _of_pytorch(frame):
            return None  # its own use of Triton goes deep, and it can do without
        known = package in self.served or package in self.wanted
        if not known and (probe or is_guarded(frame)):
            self._note(package, frame)
            return None
        spec = self._spec(fullname, rules)
        if spec is None and not probe and (package == "triton" or not is_guarded(frame)):
            spec = _empty(fullname)
        if spec is not None and not probe:
            if package == "triton":
                has_triton_package()  # which remembers the answer
            if package not in self.served and package not in self.wanted:
                self.served.add(package)
                forget_probes()
            self.served.add(package)
            self._modules.append(fullname)
        return spec

    def _note(self, package: str, frame: Any) -> None:
        where = shown_path(frame.f_code.co_filename) if frame is not None else ""
        if where and not is_installed(frame.f_code.co_filename):
            self.done_without.setdefault(package, f"{where}:{frame.f_lineno}")

    def _spec(self, fullname: str, rules: set[str]) -> importlib.machinery.ModuleSpec | None:
        found = _in_packages(fullname)
        if found is not None and found.loader is not None:
            found.loader = _PackageLoader(found.loader)
            if found.submodule_search_locations is not None:
                found.submodule_search_locations = []  # so that submodules are asked for here too
            return found
        if any(name.startswith(fullname + ".") for name in rules):
            return _empty(fullname)
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """Part of the protocol of `importlib.metadata`."""
        asked = getattr(context, "name", None)
        visible = (self.wanted | self.served) & set(VERSIONS)
        for package in sorted(visible):
            name = DISTRIBUTIONS.get(package, package)
            if asked is None or asked.lower().replace("-", "_") == name:
                yield _Distribution(package)


class _Extensions:
    """Comes first: compiled parts of packages that may be installed, and need a driver to load."""

    def __init__(self, standins: StandInFinder) -> None:
        self._standins = standins
        self._modules = standins._modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import protocol."""
        if fullname.startswith("torch."):
            return self._of_torch(fullname, path)
        package = EXTENSIONS.get(fullname)
        if package is None or not (installed(package) or self._standins.stands_in(package)):
            return None
        self._modules.append(fullname)
        if fullname.endswith("softmax_cuda"):
            return spec_from_file_location(fullname, PACKAGES / "apex_softmax.py")
        return _in_packages(fullname) or _empty(fullname)

    def _of_torch(
        self, fullname: str, path: Sequence[str] | None
    ) -> importlib.machinery.ModuleSpec | None:
        if "triton" not in self._modules:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path) for finder in behind)
        found = next((spec for spec in specs if spec is not None), None)
        if found is not None and found.loader is not None:
            found.loader = _WithoutTriton(found.loader)
        return found


class _WithoutTriton(WrappedLoader):
    """A module of PyTorch's, which sees no stand-in for Triton."""

    def exec_module(self, module: ModuleType) -> None:
        with without_triton():
            super().exec_module(module)


@contextmanager
def without_triton() -> Iterator[None]:
    """Inside, a stand-in for Triton is hidden. PyTorch's compilers work without it."""
    served = sys.modules.get("triton")
    loader = getattr(getattr(served, "__spec__", None), "loader", None)
    if not isinstance(loader, _PackageLoader):  # hidden already, as in an import within another
        yield
        return
    hidden = {
        name: found for name, found in sys.modules.items() if name.partition(".")[0] == "triton"
    }
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.update(hidden)


class _PackageLoader(WrappedLoader):
    """A file of a stand-in, whose unknown names are `Unknown`."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if "__getattr__" not in vars(module):
            make_permissive(module)


class _EmptyLoader(Loader):
    """A module of which only the rules that users registered are known."""

    def exec_module(self, module: ModuleType) -> None:
        make_permissive(module)
        if module.__name__ in VERSIONS:
            module.__version__ = VERSIONS[module.__name__]  # type: ignore[attr-defined]


def _of_pytorch(frame: FrameType | None) -> bool:
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == "torch"


def _in_packages(fullname: str) -> importlib.machinery.ModuleSpec | None:
    parent = fullname.rpartition(".")[0]
    folder = PACKAGES.joinpath(*parent.split(".")) if parent else PACKAGES
    return importlib.machinery.PathFinder.find_spec(fullname, [str(folder)])


def _empty(fullname: str) -> importlib.machinery.ModuleSpec:
    return importlib.machinery.ModuleSpec(fullname, _EmptyLoader(), is_package=True)


def make_permissive(module: ModuleType) -> None:
    """Names that a module lacks are `Unknown`, but where the program can do without."""

    def missing(name: str) -> Any:
        frame, _ = importing_frame()
        if not name.startswith("__") and _in_packages(f"{module.__name__}.{name}") is not None:
            return importlib.import_module(f"{module.__name__}.{name}")
        if module.__name__.partition(".")[0] == "triton" and not name.startswith("__"):
            return vars(module).setdefault(name, _device_name(module.__name__, name))
        if name.startswith("__") or is_guarded(frame):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return Unknown(f"{module.__name__}.{name}")

    module.__getattr__ = missing  # type: ignore[method-assign]


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, package: str) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            name = DISTRIBUTIONS.get(self._package, self._package).replace("_", "-")
            return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version_of(self._package)}\n"
        return self._package + "\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return PACKAGES / path


def forget_probes() -> None:
    """Packages that remember which others are there look again."""
    for name in _PROBING:
        module = sys.modules.get(name)
        for function in vars(module).values() if module is not None else ():
            if callable(forget := getattr(function, "cache_clear", None)):
                forget()


def installed(package: str) -> bool:
    """Whether a package can be found without a stand-in."""
    return importlib.machinery.PathFinder.find_spec(package) is not None
