"""What pip installs: a wheel for every version of Python, with the kernel or without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import gadam
from gadam.optim import cpu

ROOT = Path(__file__).parents[1]
SOURCES = ["src", "csrc", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
MANIFEST = ["constraints.txt", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md"]
TRAIN = """
import sys, torch, gadam

model = torch.nn.Linear(4, 2)
optimizer = gadam.GadamX(model.parameters(), lr=0.1, average=gadam.Averaging(start=1))
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
losses = []
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with optimizer.average.applied(model):
    assert torch.isfinite(model(x)).all()
assert optimizer.average.count == 3 and losses[2] < losses[0]
print(gadam.__file__)
print(gadam.backends()["cpu"])
"""


def run(*command: object, **keywords: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        **{"capture_output": True, "text": True, **keywords},  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def build(source: Path, kind: str, **variables: str) -> Path:
    """Build a wheel or an sdist without an isolated environment, and return its path."""
    program = (
        f"import setuptools.build_meta as b; name = b.build_{kind}('dist'); "
        "open('dist/name', 'w').write(name)"
    )
    (source / "dist").mkdir(exist_ok=True)
    run(sys.executable, "-c", program, cwd=source, env={**os.environ, **variables})
    return source / "dist" / (source / "dist" / "name").read_text()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.dll", "*.egg-info")
    for name in (*SOURCES, *MANIFEST):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return build(copy, "sdist")


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (source,) = folder.iterdir()
    return source


def installed(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment that sees this one's torch. Return its programs."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
    run(sys.executable, "-m", "pip", "--python", programs / "python", *install)
    (packages,) = {path.parents[1] for path in folder.rglob("gadam/__init__.py")}
    (packages / "test_environment.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return programs


def train(programs: Path) -> str:
    """Train three steps with the installed package. Return the description of the kernel."""
    file, kernel = run(programs / "python", "-I", "-c", TRAIN, cwd=programs).splitlines()
    assert Path(file).is_relative_to(programs.parent)
    assert run(programs / "gadam", "--version", cwd=programs).strip() == gadam.__version__
    return kernel


def test_the_sdist_contains_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/step.c", "csrc/element.h", "setup.py", "pyproject.toml", "LICENSE"} <= names
    assert {"src/gadam/py.typed", "src/gadam/report/page.html"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.skipif(not cpu.is_available(), reason=f"no CPU kernel: {cpu.describe()}")
def test_the_wheel_serves_every_python_and_trains(sdist, tmp_path):
    source = unpacked(sdist, tmp_path / "source")
    # Compiling takes a minute. The build takes a library that is newer than its sources as it is.
    place = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/gadam"
    kernel = next(Path(gadam.__file__).parent.glob("_kernel.*"))
    (source / place).mkdir(parents=True)
    shutil.copyfile(kernel, source / place / kernel.name)
    wheel = build(source, "wheel", CC="false")
    assert wheel.name.startswith(f"gadam-{gadam.__version__}-py3-none-")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert f"gadam/{kernel.name}" in names
    assert {"gadam/py.typed", "gadam/report/page.html", "gadam/report/page.js"} <= names
    assert "gadam/train/data/fashion_mini/train-images-idx3-ubyte.gz" in names
    assert train(installed(wheel, tmp_path / "environment")) == gadam.backends()["cpu"]


def test_without_a_compiler_the_sdist_installs_and_says_so(sdist, tmp_path):
    wheel = build(unpacked(sdist, tmp_path / "source"), "wheel", CC="false")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_kernel" in name]
    kernel = train(installed(wheel, tmp_path / "environment"))
    assert kernel == "not built (no compiler was found when gadam was installed)"


def test_a_build_that_requires_the_kernel_fails_without_a_compiler(sdist, tmp_path):
    source = unpacked(sdist, tmp_path / "source")
    with pytest.raises(AssertionError, match=r"csrc/step\.c"):
        build(source, "wheel", CC="false", GADAM_REQUIRE_KERNEL="1")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is for Linux")
def test_the_compiled_wheel_is_small_stripped_and_manylinux(sdist, tmp_path):
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no compiler")
    pytest.importorskip("auditwheel")
    source = unpacked(sdist, tmp_path / "source")
    wheel = build(source, "wheel", GADAM_REQUIRE_KERNEL="1")
    with zipfile.ZipFile(wheel) as archive:
        kernel = archive.read("gadam/_kernel.so")
    assert len(kernel) < 3e6  # of 360 variants
    for name in (b".debug_info", b".symtab", b"libgomp", b"libpython"):
        assert name not in kernel, name
    command = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path / "out", wheel)
    run(*command, env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    (repaired,) = (tmp_path / "out").iterdir()
    assert "-py3-none-manylinux" in repaired.name
    with zipfile.ZipFile(repaired) as archive:
        assert not [name for name in archive.namelist() if ".libs/" in name]  # no second OpenMP
    assert "OpenMP" in train(installed(repaired, tmp_path / "environment"))
