"""The text: Python's own reference, as `help()` shows it, cut into words; and a bigram model of it to compare with."""

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

UNKNOWN = "<unknown>"
RARE = 3
"""Words that occur less often in the training text are unknown."""
_WORD = re.compile(r"[A-Za-z_]+|[0-9]+|[^\sA-Za-z0-9_]")


@dataclass(frozen=True)
class Corpus:
    """A text as numbers of words.

    Attributes:
        words: by its number, each word of the vocabulary.
        train, valid: the numbers, in order; int64 of shape [n].
    """

    words: list[str]
    train: Tensor
    valid: Tensor


def read_text() -> str:
    """Returns the topics of the language reference that come with Python itself, in the order of their names."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def make_corpus(text: str, valid_every: int = 10) -> Corpus:
    """Makes the vocabulary and splits the text: of each ten parts, one is for validation.

    The parts are as long as a page or so; topics differ a lot, so that one long part at the end would be another text.
    """
    tokens = [word.lower() for word in _WORD.findall(text)]
    part = 500
    parts = [tokens[i : i + part] for i in range(0, len(tokens), part)]
    train = [word for i, words in enumerate(parts) if i % valid_every != valid_every - 1 for word in words]
    valid = [word for i, words in enumerate(parts) if i % valid_every == valid_every - 1 for word in words]
    counts = Counter(train)
    words = [UNKNOWN, *sorted(word for word, n in counts.items() if n >= RARE)]
    numbers = {word: i for i, word in enumerate(words)}
    return Corpus(words, *(torch.tensor([numbers.get(word, 0) for word in text]) for text in (train, valid)))


def batches(tokens: Tensor, columns: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Cuts a text into columns that are read side by side, and these into pieces.

    Arguments:
        tokens: the text, of shape [n].
        columns: how many columns.
        steps: how many words of each column a piece has at most.

    Returns pairs of input and target, each of shape [steps, columns]; the target is the word that follows.
    """
    rows = (len(tokens) - 1) // columns
    sources = tokens[: rows * columns].view(columns, rows).t().contiguous()
    targets = tokens[1 : rows * columns + 1].view(columns, rows).t().contiguous()
    return [(sources[i : i + steps], targets[i : i + steps]) for i in range(0, rows, steps)]


def bigram_perplexity(corpus: Corpus) -> float:
    """Returns the perplexity, on the validation text, of a bigram model with interpolated Kneser-Ney smoothing.

    The discount is the usual estimate n1 / (n1 + 2 n2), of how many pairs occur once and twice. (Chen and Goodman, "An
    empirical study of smoothing techniques for language modeling", 1999.)
    """
    size = len(corpus.words)
    train = corpus.train.tolist()
    pairs = Counter(itertools.pairwise(train))
    firsts, followers, preceders = Counter(train[:-1]), Counter[int](), Counter[int]()
    for first, second in pairs:
        followers[first] += 1
        preceders[second] += 1
    once, twice = (sum(1 for n in pairs.values() if n == k) for k in (1, 2))
    discount = once / (once + 2 * twice)
    logs, valid = [], corpus.valid.tolist()
    for first, second in itertools.pairwise(valid):
        # A thousandth of even distribution, for words that follow nothing.
        p = 0.999 * preceders[second] / len(pairs) + 0.001 / size
        if firsts[first]:
            share = discount * followers[first] / firsts[first]
            p = max(pairs[first, second] - discount, 0) / firsts[first] + share * p
        logs.append(math.log(p))
    return math.exp(-sum(logs) / len(logs))
