"""The smaller examples of parameter servers and pipelines, as programs."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import actorrpc as rpc
from examples.pipeline.roles import CLASSES, make_batch

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, timeout: float = 100) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def share(text: str) -> float:
    """Returns the percentage that a program prints."""
    return float(next(word for word in text.split() if word.endswith("%"))[:-1])


@pytest.mark.timeout(120)
def test_a_server_that_takes_gradients_in_batches_trains() -> None:
    text = run("examples.batch_ps", "--trainers", "3")
    assert text.startswith("200 steps for 3 trainers: ")
    assert share(text) > 80


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_pipeline_of_two_stages_trains() -> None:
    assert share(run("examples.pipeline", timeout=150)) > 90


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_data_parallel_trainers_with_a_sparse_table_train_and_stay_equal() -> None:
    text = run("examples.ddp_rpc", timeout=150)
    words = text.split()
    assert float(words[4]) < 0.7 * float(words[1])
    assert text.endswith("The dense parts of all trainers are equal.\n")


def test_the_pictures_classes_can_be_told_apart() -> None:
    pictures, classes = make_batch(400, torch.Generator().manual_seed(0))
    means = torch.stack([pictures[classes == number].mean(0) for number in range(CLASSES)])
    distances = torch.cdist(means.flatten(1), means.flatten(1)) + 10 * torch.eye(CLASSES)
    assert distances.min() > 1


@pytest.mark.parametrize("example", ["batch_ps", "pipeline", "ddp_rpc"])
def test_an_interrupted_example_ends_with_a_word(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**roles: rpc.Role) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rpc, "launch", interrupted)
    with pytest.raises(SystemExit, match="Stopped"):
        importlib.import_module(f"examples.{example}.__main__").main([])
