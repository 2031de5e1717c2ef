"""Texts to train a vocabulary on: pieces have the words of the whole, in bounded time."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data.prepare import pieces as module
from data.prepare.pieces import SPLIT, Pieces
from data.prepare.vocabulary import train_bpe

# Contractions, runs of spaces and marks, letters with marks of their own, two alphabets.
PARTS = ["a", "Zz", "'re", "'", "n't", " ", "   ", "\n\n", "\r\n", "\t", "12", "3", "_", "!?", "="]
PARTS += ["é", "e\u0301", "漢字", "，", "สวัสดี", "½", "\u00a0", "\u2003", "🙂", "\x1c"]


def words(texts) -> Counter[str]:
    return Counter(word for text in texts for word, _ in SPLIT.pre_tokenize_str(text))


@pytest.mark.parametrize("seed", range(6))
def test_pieces_have_the_words_of_the_text(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LONGEST", 24)
    monkeypatch.setattr(module, "PIECE", 60)
    draw = random.Random(seed)
    texts = ["".join(draw.choices(PARTS, k=draw.randrange(400))) for _ in range(30)]
    pieces = Pieces(texts)
    found = list(pieces)
    assert "".join(found) == "".join(texts)
    assert (pieces.n_cuts, words(found)) == (0, words(texts))
    assert max(map(len, found)) < 60 + 2 * 24 + 24


@pytest.mark.parametrize("letters", ["a", " ", "=", "漢", "ab"])
def test_longer_words_are_cut_and_counted(letters: str):
    draw = random.Random(0)
    run = "".join(draw.choices(letters, k=10 * module.LONGEST))
    pieces = Pieces([f"def f(x):\n    {run}"])
    assert max(map(len, words(pieces))) <= 3 * 2 * module.LONGEST  # three bytes a character
    assert 8 <= pieces.n_cuts <= 10


def test_cut_words_are_said(capsys: pytest.CaptureFixture[str]):
    train_bpe(["x" * 5000, "y"], 300)
    assert capsys.readouterr().err == (
        "warning: text without a break for 2,048 characters and more: cut 3 times to train the "
        "tokenizer\n"
    )


def test_vocabulary_is_that_of_the_whole_text(monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(1)
    text = "".join(draw.choices(PARTS, k=20_000))
    whole = train_bpe([text], 400)
    monkeypatch.setattr(module, "PIECE", 100)
    assert train_bpe([text], 400).fingerprint == whole.fingerprint


GROWTH = """
import resource
from data.prepare.vocabulary import train_bpe
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
text = "".join(f"{number * 7919 % 9973} " for number in range(4_000_000))
before = peak()
train_bpe([text], 300)
print(peak() - before)
"""


@pytest.mark.slow
def test_one_long_text_takes_little_memory():
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", GROWTH], cwd=root, capture_output=True, check=True)
    assert int(run.stdout) < 150  # MB; as one piece the same text takes 1,500
