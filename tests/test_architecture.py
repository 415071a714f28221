"""The rules of the project's layout (CONTRIBUTING.md), and that each of them turns red on a seeded fault."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mtp_train", "precompute", "eval", "slurm")
MAX_FILE, MAX_FUNCTION = 350, 60
MACHINE = re.compile(
    r"(?<![\w.$}*])/(?:home|root|work|Users|mnt|scratch|tmp)/"  # a path of one machine
    r"|(?<![\w/.])(?:\.\./)*shared/"  # a folder that is not part of the project
    r"|https?://[\w.-]*pypi|--(?:extra-)?index-url|--find-links"  # a package index
)


# ---------------------------------------------------------------- the rules: each gives one line per fault


def sources(root: Path) -> Iterator[Path]:
    """Python files of the product."""
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def tracked(root: Path) -> Iterator[Path]:
    """Text files that are part of the product: code, configuration, build files, pages."""
    yield from sources(root)
    for pattern in ("conf/**/*.yaml", "requirements/*", "slurm/*", ".ci/*", "*.md", "*.toml", "Makefile"):
        yield from sorted(path for path in root.glob(pattern) if path.is_file() and path.suffix != ".py")


def init_with_code(root: Path) -> list[str]:
    return [f"{path}: an __init__.py has code" for path in sources(root) if path.name == "__init__.py" and ast.parse(path.read_text()).body]


def long_files(root: Path) -> list[str]:
    sizes = {path: len(path.read_text().splitlines()) for path in sources(root)}
    return [f"{path}: {size} lines, the limit is {MAX_FILE - 1}" for path, size in sizes.items() if size >= MAX_FILE]


def long_functions(root: Path) -> list[str]:
    faults = []
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno + 1 >= MAX_FUNCTION:
                faults.append(f"{path}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines, the limit is {MAX_FUNCTION - 1}")
    return faults


def prints(root: Path) -> list[str]:
    faults = []
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                faults.append(f"{path}:{node.lineno}: print")
    return faults


def targets_in_conf(root: Path) -> list[str]:
    """Configuration holds values, never names of code to run."""
    return [f"{path}: _target_" for path in sorted((root / "conf").rglob("*.y*ml")) if "_target_" in path.read_text()]


def machine_paths(root: Path) -> list[str]:
    """Paths of one machine, and hosts of one package index."""
    faults = []
    for path in tracked(root):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if match := MACHINE.search(line):
                faults.append(f"{path}:{number}: {match.group()}")
    return faults


RULES = (init_with_code, long_files, long_functions, prints, targets_in_conf, machine_paths)


def lint_imports(root: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    return subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120)


# ---------------------------------------------------------------- this project


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    assert "\n".join(rule(ROOT)) == ""


def test_rules_look_at_everything():
    names = {path.relative_to(ROOT).as_posix() for path in tracked(ROOT)}
    assert {"mtp_train/heads/base.py", "precompute/run.py", "eval/run.py", "conf/pipeline.yaml", "conf/experiment/demo.yaml", ".ci/run", "Makefile"} <= names
    assert {"pyproject.toml", "CONTRIBUTING.md", "requirements/base.txt"} <= names


def test_layers_hold():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


# ---------------------------------------------------------------- seeded faults

FAULTS = {
    "init_with_code": ("eval/__init__.py", "from eval.run import main\n"),
    "long_files": ("mtp_train/data/long.py", "x = 1\n" * MAX_FILE),
    "long_functions": ("precompute/long.py", "async def f():\n" + "    x = 1\n" * (MAX_FUNCTION - 1)),
    "prints": ("mtp_train/loud.py", 'def f():\n    print("done")\n'),
    "targets_in_conf": ("conf/head/magic.yaml", "_target_: mtp_train.heads.mtp.MTPHead\n"),
}
NO_FAULTS = {
    "init_with_code": ("eval/__init__.py", "\n"),
    "long_files": ("mtp_train/data/long.py", "x = 1\n" * (MAX_FILE - 1)),
    "long_functions": ("precompute/long.py", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION - 2)),
    "prints": ("mtp_train/quiet.py", '"""It never calls print(x)."""\nlog.print(1)\n'),
    "targets_in_conf": ("conf/target/hf.yaml", "target_path: x\n"),
}


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize("rule", RULES[:-1], ids=lambda rule: rule.__name__)
def test_rule_sees_a_fault(rule, tmp_path):
    write(tmp_path / "good", *NO_FAULTS[rule.__name__])
    assert rule(tmp_path / "good") == []
    write(tmp_path / "bad", *FAULTS[rule.__name__])
    assert len(rule(tmp_path / "bad")) == 1


@pytest.mark.parametrize("name", ["mtp_train/a.py", "conf/a.yaml", "Makefile", ".ci/run", "CONTRIBUTING.md", "slurm/train.sbatch", "requirements/base.txt"])
@pytest.mark.parametrize(
    "text",
    [
        "cache = '/home/ann/x'",
        "/root/.cache/pip",
        "see ../shared/DESIGN.md",
        "shared/DESIGN.md",
        "pip install --index-url x",
        "https://pypi.org/simple",
        "cd /work/main",
    ],
)
def test_machine_paths_are_seen_everywhere(name, text, tmp_path):
    write(tmp_path, name, f"first line\n{text}\n")
    assert len(machine_paths(tmp_path)) == 1
    assert ":2: " in machine_paths(tmp_path)[0]


@pytest.mark.parametrize(
    "text", ["/proc/cpuinfo", "layers are shared / tied", "shared weights", "runs/demo/tmp/x", "${HOME}/work/", "$SCRATCH/tmp/", "https://arxiv.org/abs/1"]
)
def test_harmless_text_passes(text, tmp_path):
    write(tmp_path, "mtp_train/a.py", text)
    assert machine_paths(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "line", "contract"),
    [
        ("mtp_train/loss.py", "from eval.report import x", "no stage package"),
        ("mtp_train/target/hf.py", "def f():\n    import vllm.config", "no inference engine"),
        ("mtp_train/heads/mtp.py", "from mtp_train.data.shards import x", "downwards only"),
        ("mtp_train/spec_decode/engine.py", "import mtp_train.train", "downwards only"),
        ("mtp_train/placeless.py", "", "downwards only"),
        ("precompute/plan.py", "from eval.prompts import x", "do not know each other"),
    ],
)
def test_layers_see_a_fault(name, line, contract, tmp_path):
    for package in PACKAGES:
        if (ROOT / package).exists():
            shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / name).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [row for row in done.stdout.splitlines() if row.endswith("BROKEN")]
    if name != "mtp_train/placeless.py":
        assert any(contract in row for row in broken), broken  # a stage package that uses the faulty module breaks its own contract as well
    else:
        assert "placeless" in done.stdout
