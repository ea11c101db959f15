"""Data flows one way through the modules: each imports only what comes before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.helpers import ROOT

# From the bottom to the top. A package stands for all its modules.
LAYERS = [
    ["errors"],
    ["abi", "env", "gc_pause", "interrupts", "nvtx_ranges", "open_files"],
    ["absent_parameters", "console", "parameter_checks", "user_files"],
    ["progress"],
    ["model"],
    ["models", "formats"],
    ["graph"],
    ["tasks", "weights"],
    ["drafters", "sync"],
    ["lower"],
    ["program"],
    ["check"],
    ["bootstrap"],
    ["backends"],
    ["trace"],
    ["text"],
    ["engine"],
    ["api"],
    ["server", "testing"],
    ["doctor"],
    ["cli"],
    ["__main__", "packaging"],
]

LAB = ROOT / "examples" / "launch_lab" / "lab"
PACKAGES = ("distmk", "lab")


def parts_of(module: str) -> str:
    """The part of a module: `check` for `distmk.check.order`."""
    return module.split(".")[1] if "." in module else ""


def modules(package: Path = ROOT / "distmk") -> dict[str, Path]:
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> Iterator[tuple[str, int]]:
    """Modules of distmk and of the lab that a file imports anywhere, with lines, except for type checkers only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            name = node.module or ""
            if name.split(".")[0] in PACKAGES:
                for alias in node.names:
                    inner = f"{name}.{alias.name}"
                    yield inner if inner in known else name, node.lineno


def test_every_module_has_a_layer() -> None:
    listed = [name for layer in LAYERS for name in layer]
    assert len(listed) == len(set(listed))
    present = {parts_of(module) for module in modules()} - {""}
    assert set(listed) == present, f"without a layer: {present - set(listed)}; not there: {set(listed) - present}"


def test_imports_point_down() -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    known = modules()
    wrong = []
    for module, path in known.items():
        part = parts_of(module)
        for imported, line in imports(path, set(known)):
            target = parts_of(imported) if imported.split(".")[0] == "distmk" else ""
            if part and target and part != target and level[target] >= level[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} (layer {level[part]}) imports {target}")
    assert not wrong, "\n".join(wrong)


def test_the_server_stands_on_the_api_alone() -> None:
    """Names of the engine and of texts that HTTP needs are exported by `distmk` or by modules of `distmk.api`."""
    known = modules()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {imported}"
        for module, path in known.items()
        for imported, line in imports(path, set(known))
        if parts_of(module) == "server" and parts_of(imported) in ("engine", "text")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_its_command_imports_the_launch_lab() -> None:
    """The lab is an example that uses distmk; distmk works without it."""
    known = modules() | modules(LAB)
    edges = {(module, imported) for module, path in modules().items() for imported, _ in imports(path, set(known))}
    assert {module for module, imported in edges if imported.split(".")[0] == "lab"} == {"distmk.cli.lab_command"}


def test_no_cycles_between_modules() -> None:
    """Also inside packages and the launch lab; imports inside functions count."""
    known = modules() | modules(LAB)
    edges = {m: {i for i, _ in imports(path, set(known)) if i in known and i != m} for m, path in known.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for imported in sorted(edges[module]):
                visit(imported, (*above, module))
            done.add(module)

    for module in sorted(known):
        visit(module, ())
