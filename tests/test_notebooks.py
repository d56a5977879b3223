"""Programs in notebooks: classes and functions of a cell, in a real kernel."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="ipykernel is not installed")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
ROOT = str(Path(__file__).parents[1])
Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs the text of a cell in a kernel, and returns what it prints."""
    manager: Any = jupyter_client.KernelManager(connection_file=str(tmp_path / "kernel.json"))
    spec = jupyter_client.kernelspec.KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name="", language="python"
    )
    manager._kernel_spec = spec  # that of this very Python, wherever it is installed
    manager.start_kernel(cwd=ROOT)
    client = manager.client()
    client.start_channels()

    def cell(text: str) -> str:
        said: list[str] = []

        def hear(message: Any) -> None:
            if message["msg_type"] == "stream":
                said.append(message["content"]["text"])
            elif message["msg_type"] == "error":
                raise AssertionError("\n".join(message["content"]["traceback"]))

        client.execute_interactive(textwrap.dedent(text), timeout=90, output_hook=hear)
        return "".join(said).strip()

    try:
        client.wait_for_ready(timeout=60)
        yield cell
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


CLASSES = """
    import actorrpc as rpc

    FACTOR = 2

    class Box:
        def __init__(self, x): self.x = x

    class Server(rpc.Actor):
        def double(self, box): return Box(FACTOR * box.x), type(box) is Box

    def double(box): return Box(FACTOR * box.x)
"""


def test_launch_in_a_notebook_takes_classes_of_its_cells(run: Run) -> None:
    run(CLASSES)
    run("""
        class Driver(rpc.Actor):
            def main(self):
                box, known = self.world.server[1].rpc_sync().double(Box(4))
                return box, known, isinstance(box, Box)
    """)
    assert run("""
        box, there, here = rpc.launch(driver=Driver, server=rpc.Role(Server, 2))
        print(box.x, there, here, type(box) is Box)
    """) == "8 True True True"
    assert run("print(rpc.launch(one=lambda: rpc.rpc_sync('two:0', double, args=(Box(1),)).x, two=None))") == "2"


def test_a_notebook_is_a_worker_beside_a_script(run: Run, tmp_path: Path) -> None:
    meet = f"""
        options = rpc.RpcBackendOptions(init_method="file://{tmp_path}/meet", init_timeout=60)
    """
    script = tmp_path / "script.py"
    join = 'rpc.init_rpc("script", rank=1, world_size=2, rpc_backend_options=options)\nrpc.shutdown()\n'
    script.write_text("import actorrpc as rpc\n" + textwrap.dedent(meet) + join)
    other = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env={"PYTHONPATH": ROOT}, stderr=subprocess.PIPE)
    try:
        run(CLASSES)
        run(meet)
        run('rpc.init_rpc("notebook", rank=0, world_size=2, rpc_backend_options=options)')
        assert run("""
            server = Server.spawn("script")
            box, known = server.rpc_sync().double(Box(4))
            print(box.x, known, type(box) is Box)
        """) == "8 True True"
        assert run("print(rpc.rpc_sync('script', double, args=(Box(1),)).x)") == "2"
        run("FACTOR = 5\ndef double(box): return Box(FACTOR * box.x)")  # the cell is changed, and run again
        assert run("print(rpc.rpc_async('script', double, args=(Box(1),)).wait().x)") == "5"
        run("del server\nrpc.shutdown()")
        assert other.wait(30) == 0, other.stderr
    finally:
        other.kill()
        other.communicate()


def test_a_world_of_one_begins_and_ends_again_and_again_in_a_notebook(run: Run, tmp_path: Path) -> None:
    run(CLASSES)
    for i in range(3):
        assert run(f"""
            options = rpc.RpcBackendOptions(init_method="file://{tmp_path}/meet{i}")
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            print(rpc.rpc_sync("alone", double, args=(Box(4),)).x, rpc.remote("alone", Box, args=(1,)).to_here().x)
            rpc.shutdown()
        """) == "8 1"
