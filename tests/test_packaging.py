"""What is handed out: the wheel and the source archive hold the package and nothing else, and work on their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import actorrpc as rpc

class Echo(rpc.Actor):
    def say(self, text):
        return text.upper()

class Main(rpc.Actor):
    def main(self):
        return self.world.echo.rpc_sync().say("from the wheel")

if __name__ == "__main__":
    print(rpc.__file__)
    print(rpc.launch(main=Main, echo=Echo))
"""


def build(what: str, into: Path) -> Path:
    """Builds the wheel ("wheel") or the source archive ("sdist") of the tracked files, and returns it."""
    source = into / "source"
    source.mkdir()
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=False).stdout
    if not names:
        pytest.skip("this is no git checkout, so what belongs to the package is not known")
    for name in names.decode().split("\0"):
        path = ROOT / name
        if path.is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    program = f"from setuptools import build_meta; print(build_meta.build_{what}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def tracked(pattern: str) -> set[str]:
    done = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tracked("actorrpc/*.py") | {"actorrpc/py.typed"}


@pytest.mark.slow
def test_the_wheel_says_what_it_needs_and_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    metadata = archive.read(f"{info}/METADATA").decode()
    needs = {re.split(r"[<>=]", line)[0] for line in re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)}
    assert needs == {"cloudpickle", "numpy", "pyzmq", "torch"}
    assert "License-Expression: BSD-3-Clause" in metadata
    assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert "actorrpc = actorrpc.commands:main" in archive.read(f"{info}/entry_points.txt").decode()


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", tmp_path)
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    program = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=True)
    again = tmp_path / done.stdout.splitlines()[-1]
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Torch and the rest are lent by this environment; of actorrpc there is only what the wheel has brought."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    own = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    lent = sysconfig.get_path("purelib")  # on the path, where Python reads no .pth file: not this checkout with it
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PYTHONPATH"] = os.pathsep.join((own, lent))
    done = subprocess.run(
        [str(python), "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{own}/actorrpc/__init__.py", "['FROM THE WHEEL']"]
    command = [str(python.parent / "actorrpc"), "version"]
    said = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert said.stdout.startswith("actorrpc 0.")
