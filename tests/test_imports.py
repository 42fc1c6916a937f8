"""Imports go one way, nothing heavy comes with them, and no device is started."""

import ast
import importlib.util
import pathlib
import subprocess
import sys

import pytest

# What each package may import of the others.
ALLOWED = {
    "kvjax_kernels": set(),
    "kvjax": {"kvjax_kernels"},
    "kvjax_models": {"kvjax", "kvjax_kernels"},
}
OPTIONAL = [
    "tokenizers",
    "jinja2",
    "gguf",
    "safetensors",
    "huggingface_hub",
    "rich",
    "matplotlib",
    "optax",
    "orbax",
    "torch",
    "transformers",
]


def folder(package: str) -> pathlib.Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin).parent


def imported_packages(file: pathlib.Path) -> set[str]:
    """Top-level names of all imports in a file, those within functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            assert node.module is not None
            names.add(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package):
    root = folder(package)
    files = sorted(root.rglob("*.py"))
    assert files
    for file in files:
        inside = file.relative_to(root).parts
        # The command line stands on top of all three.
        allowed = set(ALLOWED) if package == "kvjax" and inside[0] == "cli" else ALLOWED[package] | {package}
        outside = imported_packages(file) & set(ALLOWED) - allowed
        assert not outside, f"{package}/{'/'.join(inside)} imports {outside}"


def test_nothing_below_the_command_line_imports_it():
    root = folder("kvjax")
    for package in ALLOWED:
        for file in folder(package).rglob("*.py"):
            if (root / "cli") not in file.parents:
                assert "kvjax.cli" not in file.read_text(encoding="utf-8"), file


def test_the_modules_of_a_package_do_not_import_the_package_itself():
    # `import kvjax` within kvjax would make it depend on which module comes first.
    root = folder("kvjax")
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] in ("cli", "__init__.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert "kvjax" not in {alias.name for alias in node.names}, file
            if isinstance(node, ast.ImportFrom):
                assert node.module != "kvjax", file


def loaded_modules(program: str) -> set[str]:
    """Top-level modules after a program in a process of its own, which must not have started a backend."""
    program += (
        "\nimport sys, jax._src.xla_bridge as bridge"
        "\nassert not bridge.backends_are_initialized(), 'a backend has been started'"
        "\nprint(*{name.split('.')[0] for name in sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_kvjax_loads_no_optional_package_and_starts_no_device():
    loaded = loaded_modules("import kvjax\nkvjax.SnapKV(budget=64)\nkvjax.StreamingLLM(budget=64)")
    assert not loaded & {*OPTIONAL, "flax", "kvjax_models"}


def test_kvjax_models_loads_nothing_that_flax_does_not_load_and_starts_no_device():
    with_flax = loaded_modules("from flax import nnx")
    loaded = loaded_modules("import kvjax_models")
    assert not (loaded & set(OPTIONAL)) - with_flax
