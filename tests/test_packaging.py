"""The wheel: what is in it, its metadata, and that what it imports is declared."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions, packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import pd_cache
from tests.support.cli import printed
from tests.support.cluster import cluster_file, free_node
from tests.test_architecture import ROOT

pytestmark = pytest.mark.slow

PACKAGES = ("pd_cache", "transfer", "launch", "bench")
BROUGHT_ALONG = {
    "vllm": "starts us, in an environment of its own",
    "lmcache": "loads us, in an environment of its own",
    "sglang": "loads us, in an environment of its own",
    "huggingface_hub": "vllm brings it",
    "triton": "torch brings it where there is CUDA",
}
"""What is imported only where something else has installed it."""
EXTRAS = {"mooncake": ("cpu", "cuda12", "cuda13"), "opentelemetry": ("otel",)}
"""What is imported inside of functions only, so that an installation without it has the rest."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources: setuptools leaves its own files beside them."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    for name in (*PACKAGES, "configs"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    printed(sys.executable, "-c", build, target, cwd=source)
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked):
    (found,) = distributions(path=[str(unpacked)])
    return found.metadata


def requirements(metadata):
    """Distribution names by extra; those of the empty extra are always installed."""
    found = {extra: set() for extra in ("", *metadata.get_all("Provides-Extra", []))}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        marker = requirement.marker
        extras = [extra for extra in found if extra and marker.evaluate({"extra": extra})] if marker else [""]
        for extra in extras:
            found[extra].add(canonicalize_name(requirement.name))
    return found


def foreign_imports(package):
    """Each file, the top-level module that it imports, and whether it does so as soon as it is imported
    itself."""
    ours = {*PACKAGES, *sys.stdlib_module_names}
    for file in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - ours:
                yield file.relative_to(ROOT), name, node in tree.body


def test_the_wheel_has_all_that_runs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    modules = {str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    data = {f"launch/configs/{file.name}" for file in (ROOT / "configs").iterdir()}
    typed = {f"{package}/py.typed" for package in PACKAGES if (ROOT / package / "py.typed").exists()}
    page = {f"launch/proxy/ui/page.{kind}" for kind in ("html", "css", "js")}
    assert names == modules | data | typed | page | {"launch/proxy/gateway/envoy.yaml"}


def test_the_wheel_says_what_it_is(metadata, unpacked):
    assert metadata["Version"] == pd_cache.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    (about,) = unpacked.glob("*.dist-info")
    assert (about / "licenses" / "LICENSE").read_text().strip().startswith("Apache License")
    assert "pd-cache = launch.__main__:main" in (about / "entry_points.txt").read_text()
    allowed = SpecifierSet(metadata["Requires-Python"])
    named = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier", []) if "Python :: 3." in line]
    assert named == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]


def test_what_is_imported_is_declared_and_what_is_required_is_imported(metadata):
    declared = requirements(metadata)
    distributions = packages_distributions()
    used = set()
    for package in PACKAGES:
        for file, module, at_once in foreign_imports(package):
            if module in BROUGHT_ALONG:
                continue
            names = {canonicalize_name(name) for name in distributions.get(module, [])}
            extras = EXTRAS.get(module, ("",))
            if package == "bench":
                extras = (*extras, "", "bench")
            elif module in EXTRAS:
                assert not at_once, f"{file} always imports {module}, which only {extras} bring"
            assert names & set.union(*(declared[extra] for extra in extras)), (
                f"{file} imports {module}, undeclared"
            )
            used |= names
    assert declared[""] <= used


def run(unpacked, folder, *command):
    """The output of a command in an empty folder, with the wheel's packages before those of the clone."""
    return printed(sys.executable, *command, cwd=folder, PYTHONPATH=str(unpacked))


def test_the_command_works_without_a_clone(unpacked, tmp_path):
    example = run(unpacked, tmp_path, "-m", "launch", "config", "example", "local")
    assert example == (ROOT / "configs" / "local.yaml").read_text()
    (tmp_path / "local.yaml").write_text(example)
    assert "local.yaml: ok: local: 1 master" in run(
        unpacked, tmp_path, "-m", "launch", "config", "check", "--file-only", "local.yaml"
    )
    assert "--clients" in run(unpacked, tmp_path, "-m", "launch", "bench", "lookup", "--help")
    where = "import bench, launch, pd_cache, transfer; print(*{m.__path__[0] for m in (bench, launch, pd_cache, transfer)})"
    assert all(path.startswith(str(unpacked)) for path in run(unpacked, tmp_path, "-c", where).split())


def test_names_in_the_working_directory_do_not_shadow_the_packages(unpacked, tmp_path):
    for name in ("launch.py", "bench/__init__.py", "transfer/__init__.py", "pd_cache/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('not the package')")
    (tmp_path / "files").mkdir()
    nodes = [free_node("master"), free_node("store-0")]
    file = str(cluster_file(tmp_path / "files", nodes=nodes))
    # as the installed script, which does not look into the working directory
    command = ("-P", "-m", "launch")
    up = subprocess.Popen(
        [sys.executable, *command, "up", "-c", file],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(unpacked)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with up:
        ready = {up.stdout.readline().split()[1] for _ in nodes}
        up.terminate()
        up.communicate(timeout=60)  # what else it prints: nobody may close its pipe meanwhile
    assert up.returncode == 0
    assert ready == {"master", "store-0"}
