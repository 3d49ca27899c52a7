"""The release machinery agrees with the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tools import release_check

import gadam

ROOT = Path(__file__).parents[2]

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path: Path) -> list[dict[str, object]]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_version_is_the_same_everywhere():
    assert set(release_check.versions().values()) == {gadam.__version__}


def test_a_version_that_differs_is_found(tmp_path, capsys):
    for name in release_check.versions():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CITATION.cff").write_text("version: 9.9\n")
    assert release_check.versions(tmp_path)["CITATION.cff"] == "9.9"
    assert release_check.main(["--tag", "v9.9"]) == 1
    assert "The versions differ" in capsys.readouterr().err


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [str(step["run"]) for step in steps(path) if "run" in step]
    assert commands or path.stem == "none"
    for command in commands:
        assert command.startswith("make "), f"{command!r} is not a target of the Makefile."
        wanted = [word for word in command.split()[1:] if re.fullmatch(r"[a-z-]+", word)]
        assert set(wanted) <= targets, command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_few_permissions_and_time_limits(path):
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert "timeout-minutes" in job, name
        assert not {"contents", "packages"} & set(job.get("permissions", {})), name


def test_the_matrix_has_the_versions_that_the_package_claims():
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"][
        "strategy"
    ]["matrix"]
    claimed = re.findall(
        r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()
    )
    assert matrix["python"] == claimed
    assert matrix["torch"] == ["lowest", "newest"]
    assert len(matrix["os"]) == 3
