"""Within `kvjax_kernels` imports go one way, and the kernels' compilers are loaded only where they are used."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import kvjax_kernels

ROOT = pathlib.Path(kvjax_kernels.__file__).parent


def module_of(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(file: pathlib.Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, within functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    # The package itself is no file of a circle: its names come from below.
    return names & modules - {"kvjax_kernels"}


def test_no_modules_import_each_other_in_a_circle():
    files = {module_of(file): file for file in ROOT.rglob("*.py")}
    assert len(files) > 40
    graph = {module: imported(file, set(files)) for module, file in files.items()}
    assert any(graph.values())
    # Raises with the circle.
    graphlib.TopologicalSorter(graph).prepare()


def test_the_package_loads_no_kernel_and_starts_no_device():
    program = (
        "import sys, kvjax_kernels, jax._src.xla_bridge as bridge\n"
        "assert not bridge.backends_are_initialized()\n"
        "print(*[name for name in sys.modules if 'pallas' in name or name.split('.')[-1] in ('tpu', 'gpu')])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [name for name in result.stdout.split() if name.startswith("kvjax_kernels")] == []
