"""The text, the model in two places against the same in one, and the program."""

import itertools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import actorrpc as rpc
from examples.rnn_ps.__main__ import parse
from examples.rnn_ps.corpus import UNKNOWN, Corpus, batches, bigram_perplexity, make_corpus, read_text
from examples.rnn_ps.report import draw_curve
from examples.rnn_ps.roles import Epoch, Run, Settings, Trainer, local_losses

ROOT = Path(__file__).resolve().parents[2]
COMPARED = 20


def test_the_text_is_long_enough_and_always_the_same() -> None:
    corpus = make_corpus(read_text())
    assert corpus.words == make_corpus(read_text()).words
    assert len(corpus.train) > 50_000
    assert len(corpus.valid) > 5_000
    assert len(corpus.words) > 1_000


def test_rare_words_are_unknown_and_the_validation_text_makes_no_words() -> None:
    text = "a a a b b c " * 1 + "x " * 4494 + "only_here " * 500
    corpus = make_corpus(text)
    assert corpus.words == [UNKNOWN, "a", "x"]
    assert corpus.train[:6].tolist() == [1, 1, 1, 0, 0, 0]
    assert corpus.valid.tolist() == [0] * 500


def test_a_batchs_target_is_the_next_word_and_columns_go_on_in_the_next_batch() -> None:
    pieces = batches(torch.arange(25), 3, 4)
    assert [piece[0].shape for piece in pieces] == [(4, 3), (4, 3)]
    assert all(torch.equal(source + 1, target) for source, target in pieces)
    assert torch.equal(pieces[1][0][0], pieces[0][0][-1] + 1)


def test_the_bigram_model_is_a_distribution_and_knows_what_follows() -> None:
    train = [1, 2, 1, 2, 1, 3, 4, 1, 2, 3, 3, 2, 4, 4, 1]
    known = Corpus([str(i) for i in range(5)], torch.tensor(train), torch.tensor([1, 2]))

    def likelihood(first: int, second: int) -> float:
        return 1 / bigram_perplexity(Corpus(known.words, known.train, torch.tensor([first, second])))

    for first in range(5):
        assert math.isclose(sum(likelihood(first, second) for second in range(5)), 1.0, rel_tol=1e-9)
    pairs = Counter(itertools.pairwise(train))
    assert likelihood(1, 2) == max(likelihood(1, second) for second in range(5))
    assert pairs[1, 2] == max(pairs.values())


class Compared(Trainer):
    """Returns the losses of the first steps."""

    def main(self) -> list[float]:  # type: ignore[override]
        Run(self)
        hidden, losses = None, []
        for batch in self.pieces()[:COMPARED]:
            loss, hidden = self.step(batch, hidden)
            losses.append(loss)
        return losses


@pytest.mark.timeout(180)
def test_without_dropout_the_losses_are_those_of_one_process(tmp_path: Path) -> None:
    settings = Settings(tmp_path, width=64, dropout=0.0)
    losses = rpc.launch(trainer=rpc.Role(Compared, 1, settings), server=rpc.Role(None))
    assert len(losses) == COMPARED
    assert losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(local_losses(settings, COMPARED)), atol=1e-5, rtol=0)


def run(*arguments: str, timeout: float = 150) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "examples.rnn_ps", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def epochs_of(out: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = torch.load(out / "checkpoint.pt", weights_only=False)["epochs"]
    return found


@pytest.mark.timeout(180)
def test_two_trainers_share_a_server_and_leave_a_picture_and_a_checkpoint(tmp_path: Path) -> None:
    text = run("--trainers", "2", "--epochs", "2", "--limit", "4", "--width", "16", "--out", str(tmp_path))
    lines = text.splitlines()
    assert lines[1].startswith("A smoothed bigram model has a validation perplexity of ")
    assert [line.split("\t")[0] for line in lines[2:4]] == ["Epoch 1", "Epoch 2"]
    assert lines[-1].startswith("Best validation perplexity ")
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert len(epochs_of(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_resumed_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    short = ("--limit", "5", "--width", "16", "--dropout", "0")
    run(*short, "--epochs", "3", "--out", str(tmp_path / "whole"))
    run(*short, "--epochs", "2", "--out", str(tmp_path / "parts"))
    text = run(*short, "--epochs", "3", "--resume", "--out", str(tmp_path / "parts"))
    assert "Going on after epoch 2" in text
    for whole, parts in zip(epochs_of(tmp_path / "whole"), epochs_of(tmp_path / "parts"), strict=True):
        assert math.isclose(whole["train"], parts["train"], rel_tol=1e-4)
        assert math.isclose(whole["valid"], parts["valid"], rel_tol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_tutorials_run_trains_for_ten_epochs() -> None:
    lines = run("--tutorial").splitlines()
    assert [line.split(":")[0] for line in lines] == [f"Training epoch {n}" for n in range(10)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_run_is_better_than_a_bigram_model(tmp_path: Path) -> None:
    last = run("--out", str(tmp_path), timeout=800).splitlines()[-1].split()
    assert float(last[3].rstrip(",")) < float(last[5])


def test_a_curve_can_be_drawn(tmp_path: Path) -> None:
    epochs = [Epoch(1, 300.0, 200.0, 1.0), Epoch(2, 100.0, 90.0, 1.0)]
    assert draw_curve(epochs, 42.0, tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--trainers", "0"], ["--trainers", "21"], ["--dropout", "1"], ["--limit", "0"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_run_is_resumed_only_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--resume", "--out", str(tmp_path)])
    assert f"there is no checkpoint.pt in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").touch()
    assert parse(["--resume", "--out", str(tmp_path)]).resume
