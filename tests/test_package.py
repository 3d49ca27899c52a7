"""The package: its imports, its public names, and the code in its documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import gadam

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gadam"


def test_all_public_names_are_documented():
    for name in gadam.__all__:
        assert getattr(gadam, name).__doc__, name


def loaded_by(program: str) -> set[str]:
    """Return the modules that are imported once a program has run in a new process."""
    program += "\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_the_core_needs_only_torch_and_nothing_heavy():
    """Beyond `import torch`: no compiler front end, no distributed tensors, no numpy."""
    everything = "import gadam; gadam.Gadam, gadam.Averaging, gadam.average_of, gadam.backends"
    loaded = loaded_by(everything) - loaded_by("import torch")
    ours = {name for name in loaded if name.split(".")[0] == "gadam"}
    others = {name.split(".")[0] for name in loaded - ours} - {"torch"}
    assert "gadam.optim.cpu" in ours
    assert others <= set(sys.stdlib_module_names), others
    heavy = (
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
    )
    assert not [name for name in loaded if name.startswith(heavy)]
    assert len(loaded) < 40, loaded


@pytest.mark.parametrize("argument", ["--help", "--version", "comparre"])
def test_help_and_version_do_not_wait_for_torch(argument):
    loaded = loaded_by(f"from gadam.commands import main; main([{argument!r}])")
    assert "gadam.commands" in loaded
    assert not {name.split(".")[0] for name in loaded} & {"torch", "tyro", "rich", "numpy"}


def test_names_are_imported_on_first_use():
    for name in ("average", "integrations", "optim", "schedule", *gadam.__all__):
        assert name in dir(gadam)
        assert getattr(gadam, name) is getattr(gadam, name)
    with pytest.raises(AttributeError, match="module 'gadam' has no attribute 'Adam'"):
        gadam.Adam  # noqa: B018
    everything: dict[str, object] = {}
    exec("from gadam import *", everything)
    assert set(gadam.__all__) <= set(everything)


def test_integrations_need_no_import_of_their_own():
    """The README's table writes ``gadam.integrations.lightning`` after ``import gadam``."""
    written = re.findall(r"gadam\.integrations\.(\w+)\.(\w+)", (ROOT / "README.md").read_text())
    assert {module for module, _ in written} == {"lightning", "transformers", "accelerate"}
    assert "torch" not in loaded_by("import gadam; gadam.integrations")
    for module, name in written:
        assert module in dir(gadam.integrations)
        pytest.importorskip(module)
        # Once a module is imported, it is an attribute, and __getattr__ is not called.
        assert hasattr(gadam.integrations.__getattr__(module), name)
    with pytest.raises(AttributeError, match="integrations' has no attribute 'ligthning'"):
        gadam.integrations.ligthning  # noqa: B018


def test_the_core_imports_only_the_core():
    """The optim and average packages must not import what is built on them."""
    core = {"optim", "average", "schedule", "_dtensor", "_errors", "_modes", "_torch"}
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package not in core:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gadam."):
                target = (node.module or "").split(".")[1]
                assert target in core, f"{path.name} imports gadam.{target}"
                assert not (package == "average" and target == "optim"), path.name


DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "```python" in path.read_text()
]


NAMESPACES: list[dict[str, object]] = []  # of documents, kept until the tests end


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_blocks_run(document, tmp_path, monkeypatch):
    """Run the Python blocks of a document in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    if document == "docs/frameworks.md":
        for framework in ("lightning", "transformers", "accelerate"):
            pytest.importorskip(framework)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    # torch may wait forever for a thread of gloo if a DDP model is freed right after its last step.
    NAMESPACES.append(namespace)
    with warnings.catch_warnings():
        if document == "docs/frameworks.md":
            warnings.simplefilter("default")  # the frameworks' own warnings are not errors
        for block in blocks:
            exec(compile(block, document, "exec"), namespace)


def test_no_file_contains_machine_paths():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        text = (ROOT / name).read_text(errors="ignore")
        assert not re.search(r"(^|[^\w.~/-])/(root|home|tmp)/\w", text), name
