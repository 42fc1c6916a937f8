"""Builds the wheel, and imports it in a clean environment beside a research code base's own `models` folder."""

import pathlib
import subprocess
import tempfile
import zipfile

PACKAGES = {"kvjax", "kvjax_kernels", "kvjax_models"}
USE = """
import models, kvjax, kvjax_kernels, kvjax_models
assert models.OURS, "the research code's own package must win"
print("the wheel imports:", kvjax.__version__)
"""


def main() -> None:
    """Fails where the wheel installs what it should not, or does not import."""
    root = pathlib.Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run("uv", "build", "--quiet", "--wheel", "--out-dir", folder, root)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            top = {file.split("/")[0] for file in archive.namelist()}
        installed = {entry for entry in top if not entry.endswith(".dist-info")}
        if installed != PACKAGES:
            raise SystemExit(f"the wheel must install {sorted(PACKAGES)}, got {sorted(installed)}.")
        run("uv", "venv", "--quiet", "--python", "3.12", folder / "env")
        python = folder / "env/bin/python"
        run("uv", "pip", "install", "--quiet", "--python", python, wheel)
        research = folder / "research"
        (research / "models").mkdir(parents=True)
        (research / "models/__init__.py").write_text("OURS = True\n")
        run(python, "-c", USE, cwd=research)


def run(*command: str | pathlib.Path, cwd: pathlib.Path | None = None) -> None:
    """Runs a command, and stops where it fails."""
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


if __name__ == "__main__":
    main()
