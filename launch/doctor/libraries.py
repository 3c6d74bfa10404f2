"""Checks whether Mooncake's wheel can be loaded: the libraries that it links, and the CUDA runtime it was built for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from launch.doctor.finding import Finding, broken, ok, skipped, warning
from transfer.store import SYSTEM_PACKAGES

WHEELS = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
}
"""Mooncake's wheels, all of which install the package `mooncake`, and our extra that brings each."""

_WHY = "without it no process of pd-cache can reach the pool"
_LINKED = ("store.so", "mooncake_master", "mooncake_client")
_TIMEOUT_S = 30.0
_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_CUDART = re.compile(r"libcudart\.so\.(\d+)")
_PROGRAM = "from transfer.store import load_mooncake; load_mooncake()"


def library_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Looks at the wheel of this Python. `root`: where the machine's files are."""
    yield _wheel_finding(_installed())
    folder = _package_folder()
    if folder is not None:
        runtimes = cuda_runtimes(root, [Path(entry) for entry in sys.path if entry])
        for name in _LINKED:
            if (folder / name).is_file():
                yield from link_findings(name, unresolved(folder / name), runtimes)
    yield _import_finding()


def _installed() -> dict[str, str]:
    found = {}
    for name in WHEELS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _wheel_finding(installed: dict[str, str]) -> Finding:
    check = "libraries.wheel"
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not installed:
        return broken(
            check, "no Mooncake wheel is installed", why=_WHY,
            repair="pip install 'pd-cache[cpu]', or [cuda12] or [cuda13] on a machine with a GPU",
        )  # fmt: skip
    if len(installed) > 1:
        return broken(
            check, f"{shown}: several wheels of one package", why="each overwrites the files of the other",
            repair=f"pip uninstall -y {' '.join(installed)}; then install pd-cache with one of its extras",
        )  # fmt: skip
    return ok(check, f"{shown} (extra {WHEELS[next(iter(installed))]})")


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec("mooncake")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def unresolved(file: Path) -> list[str] | None:
    """Libraries that the dynamic loader does not find for `file`, itself or through others; None where it cannot be asked."""
    try:
        asked = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sorted(set(_MISSING.findall(asked.stdout))) if asked.returncode == 0 else None


def cuda_runtimes(root: Path, packages: Iterable[Path]) -> dict[int, Path]:
    """CUDA runtimes of this machine by major version, also those that torch's wheels bring."""
    places = (
        *root.glob("usr/local/cuda*/lib*/libcudart.so.*"),
        *root.glob("usr/local/cuda*/targets/*/lib/libcudart.so.*"),
        *root.glob("usr/lib/*/libcudart.so.*"),
        *(file for folder in packages for file in folder.glob("nvidia/*/lib/libcudart.so.*")),
    )
    found: dict[int, Path] = {}
    for file in places:
        if match := _CUDART.match(file.name):
            found.setdefault(int(match[1]), file)
    return found


def link_findings(name: str, missing: list[str] | None, runtimes: dict[int, Path]) -> Iterator[Finding]:
    """Yields what the libraries that `name` lacks mean, and what brings each."""
    if missing is None:
        yield skipped("libraries.linked", "ldd cannot be asked; see libraries.import", name)
    elif not missing:
        yield ok("libraries.linked", "every library that it links is there", name)
    for library in missing or ():
        if match := _CUDART.match(library):
            yield _cudart_finding(name, int(match[1]), runtimes)
        elif library.startswith("libcuda."):
            yield broken(
                "libraries.cuda", f"needs {library}, which comes with NVIDIA's driver; this machine has none", name,
                why=f"the installed wheel is one for GPUs; {_WHY}",
                repair=f"{_exchange('cpu')}   # or install NVIDIA's driver",
            )  # fmt: skip
        else:
            package = SYSTEM_PACKAGES.get(library.split(".so")[0])
            repair = (
                f"apt-get install {package}" if package else f"apt-file search {library}   # then install that package"
            )
            yield broken("libraries.linked", f"needs {library}, which this system lacks", name, why=_WHY, repair=repair)


def _cudart_finding(name: str, major: int, runtimes: dict[int, Path]) -> Finding:
    check, needs = "libraries.cuda", f"needs the CUDA {major} runtime (libcudart.so.{major})"
    here = runtimes.get(major)
    if here is not None:
        return warning(
            check, f"{needs}; it is at {here}, where the loader does not look", name,
            why="only processes that load torch before Mooncake find it: engines do, stores and masters do not",
            repair=f"export LD_LIBRARY_PATH={here.parent}:$LD_LIBRARY_PATH",
        )  # fmt: skip
    others = sorted(runtimes)
    if not others:
        found, repair = f"{needs}; this machine has no CUDA runtime", _exchange("cpu")
    else:
        versions = " and ".join(f"CUDA {other}" for other in others)
        found = f"{needs}; this machine has {versions}"
        matching = next((extra for extra in WHEELS.values() if extra in [f"cuda{other}" for other in others]), None)
        repair = _exchange(matching) if matching else f"pip install nvidia-cuda-runtime-cu{major}"
    return broken(
        check, found, name, why=f"the wheel and the runtime differ in their major version; {_WHY}", repair=repair
    )


def _exchange(extra: str) -> str:
    return f"pip uninstall -y {' '.join(WHEELS)}; pip install 'pd-cache[{extra}]'"


def _import_finding() -> Finding:
    """Imports it as our processes do, in a separate process: a library that crashes must not end the doctor."""
    check = "libraries.import"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return broken(check, f"importing mooncake.store did not end within {_TIMEOUT_S:g} s", why=_WHY,
                      repair=f'{sys.executable} -c "import mooncake.store"   # and see where it hangs')  # fmt: skip
    if done.returncode == 0:
        return ok(check, "mooncake.store can be imported")
    lines = done.stderr.strip().splitlines()
    told = lines[-1].partition("MissingLibraryError: ")[2] or lines[-1] if lines else f"it ended with {done.returncode}"
    return broken(check, f"mooncake.store cannot be imported: {told}", why=_WHY, repair="see the libraries above")
