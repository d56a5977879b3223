"""``python -m examples.rnn_ps``: trains a language model that is split between trainers and a parameter server."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("matplotlib", "tqdm")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.rnn_ps",
        description="A word language model: embedding and decoder on a parameter server, an LSTM on each trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trainers", type=int, default=1, metavar="N", help="processes that train with one server")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="how often to go through the text")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="size of the word vectors and of the LSTM")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="layers of the LSTM")
    parser.add_argument("--dropout", type=float, default=0.3, metavar="P", help="share of values that are dropped")
    parser.add_argument("--lr", type=float, default=3e-3, metavar="R", help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed for reproducibility")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="use so many batches of an epoch only")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of an earlier run")
    parser.add_argument("--tutorial", action="store_true", help="the tutorial's own sizes and random data instead")
    parser.add_argument("--out", type=Path, default=Path("runs/rnn_ps"), metavar="DIR", help="where results go")
    options = parser.parse_args(arguments)
    for name in ("trainers", "epochs", "width", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.limit is not None and options.limit < 1:
        parser.error("--limit must be at least 1")
    if options.trainers > 20:
        parser.error("--trainers must be at most 20: there are 20 columns of text to share out")
    if not 0 <= options.dropout < 1:
        parser.error("--dropout must be at least 0 and less than 1")
    if options.seed < 0:
        parser.error("--seed must be at least 0")
    if options.resume and not (options.out / "checkpoint.pt").exists():
        parser.error(f"--resume: there is no checkpoint.pt in {options.out}; a first run goes without --resume")
    return options


def main() -> None:
    options = parse()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"This example needs {' and '.join(missing)}: pip install -e '.[examples]'")

    # Imported here, so that what is missing is said above in one line.
    import actorrpc as rpc
    from examples.rnn_ps.corpus import bigram_perplexity, make_corpus, read_text
    from examples.rnn_ps.report import draw_curve
    from examples.rnn_ps.roles import Settings, Trainer
    from examples.rnn_ps.tutorial import TutorialTrainer

    if options.tutorial:
        rpc.launch(trainer=rpc.Role(TutorialTrainer), server=rpc.Role(None))
        return
    settings = Settings(
        options.out, options.epochs, options.width, options.layers, options.dropout, options.lr, seed=options.seed,
        limit=options.limit,
    )  # fmt: skip
    if not options.resume:
        (options.out / "checkpoint.pt").unlink(missing_ok=True)
    corpus = make_corpus(read_text())
    bigram = bigram_perplexity(corpus)
    print(
        f"{len(corpus.train)} words to train on, {len(corpus.valid)} to validate with, {len(corpus.words)} different "
        f"ones.\nA smoothed bigram model has a validation perplexity of {bigram:.1f}.",
        flush=True,
    )
    trainer = rpc.Role(Trainer, options.trainers, settings)
    try:
        epochs = rpc.launch(trainer=trainer, server=rpc.Role(None))
    except KeyboardInterrupt:
        sys.exit("\nStopped. --resume goes on from the last whole epoch.")
    if epochs is None:
        return  # under torchrun, only the first trainer's process has the result
    print(f"Curve: {draw_curve(epochs, bigram, options.out)}")
    best = min(epoch.valid for epoch in epochs)
    print(f"Best validation perplexity {best:.1f}, against {bigram:.1f} of the bigram model.")


if __name__ == "__main__":
    main()
