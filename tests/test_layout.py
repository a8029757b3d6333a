"""The shape of the tree: links, names, the direction of imports, and what planning must not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("models", "kernels", "sweeps", "analysis")

# The flow: a module may import from its own row and the rows above it (the longest matching prefix decides).
FLOW: tuple[tuple[str, ...], ...] = (
    ("scaling.errors",),
    ("scaling.config",),
    ("scaling.identity", "scaling.accounting"),
    ("scaling.resolve",),
    ("scaling.kernels",),
    ("scaling.models",),
    ("scaling",),  # record, corpus, tokens, loader, optim, ..., tracking, train
    ("scaling.sweeps",),
    ("scaling.analysis",),
    ("scaling.quickstart", "scaling.doctor"),
    ("scaling.cli", "scaling.__main__"),
)


def modules() -> dict[str, Path]:
    found = {}
    for top in ("scaling", *FOLDERS):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if any((ROOT / Path(*parts[:depth])).is_symlink() for depth in range(1, len(parts))):
                continue
            name = ".".join(parts if top == "scaling" else ("scaling", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def rank(module: str) -> int:
    best, row = "", -1
    for index, prefixes in enumerate(FLOW):
        for prefix in prefixes:
            if (module == prefix or module.startswith(prefix + ".")) and len(prefix) > len(best):
                best, row = prefix, index
    return row


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("folder", FOLDERS)
def test_links(folder: str) -> None:
    link = ROOT / "scaling" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"
    assert not (ROOT / folder / "__init__.py").exists(), "a regular package would shadow others' names (PEP 420)"


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_follow_the_flow(module: str) -> None:
    own = rank(module)
    for name in imported(modules()[module]):
        if name.split(".")[0] == "scaling" and name != "scaling.__version__":
            assert rank(name) <= own, f"{module} imports {name}, which comes later in the flow"


def test_flow_check_notices_a_wrong_import() -> None:
    assert rank("scaling.models.transformer") > rank("scaling.kernels.reference")
    assert rank("scaling.cli.main") > rank("scaling.analysis.fit") > rank("scaling.sweeps.plan") > rank("scaling.train")


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    names = modules()
    for module, path in names.items():
        targets = set()
        for name in imported(path, top_level_only=True):
            target = name if name in names else name.rpartition(".")[0]
            if target in names and target != module and not names[target].name == "__init__.py":
                targets.add(target)
        graph[module] = targets
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_module_is_called_like_a_standard_one() -> None:
    taken = sys.stdlib_module_names
    clash = [m for m in modules() if m.count(".") == 1 and m.split(".")[1] in taken]
    assert not clash


def test_module_names_are_nouns_of_this_field() -> None:
    banned = {"utils", "common", "helpers", "misc"}
    assert not [m for m in modules() if m.split(".")[-1] in banned]


def test_a_foreign_kernels_package_wins_from_the_root(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("def get_kernel() -> str:\n    return 'foreign'\n", encoding="utf-8")
    code = "from kernels import get_kernel; print(get_kernel()); import scaling.kernels"
    env = {**os.environ, "PYTHONPATH": str(site)}
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "foreign"


def test_lost_links_are_explained(tmp_path: Path) -> None:
    package = tmp_path / "scaling"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "scaling" / "__init__.py").read_text(encoding="utf-8"), "utf-8")
    for folder in FOLDERS:
        (package / folder).write_text(f"../{folder}", encoding="utf-8")
    out = subprocess.run([sys.executable, "-c", "import scaling"], cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode != 0 and "lost its symbolic links" in out.stderr


HEAVY = ("torch", "mlflow", "pandas", "matplotlib", "seaborn", "scipy", "statsmodels", "pyarrow", "triton", "submitit")


def loaded_by(code: str) -> set[str]:
    probe = textwrap.dedent(f"""
        import sys
        {code}
        print(" ".join(sorted(set(m.split(".")[0] for m in sys.modules))))
    """)
    out = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(out.stdout.split())


PLANNING = [
    "import scaling.cli.main as m; [m.command(n) for n in m.LazyGroup().list_commands(None)]",
    "import scaling.config.strict, scaling.identity, scaling.resolve, scaling.record",
    "import scaling.sweeps.spec, scaling.sweeps.plan",
]


@pytest.mark.parametrize("code", PLANNING)
def test_planning_loads_nothing_heavy(code: str) -> None:
    assert not loaded_by(code) & set(HEAVY)


def test_training_does_not_load_mlflow() -> None:
    assert "mlflow" not in loaded_by("import scaling.train")
