"""Peek shows the rows that training takes."""

from pathlib import Path

import numpy as np
import pytest
from conftest import Lightning, RunYaml

from data.peek import peek
from data.text.tokenizer import TextTokenizer
from data.windows import IGNORE_INDEX, Samples


class Few(Samples):
    """Two samples: one of text alone, one whose start is no target and whose end is padding."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(2, len(ids) - 1, seed=0, order="fixed")
        self.ids = np.array([ids, ids])
        self.labels = self.ids.copy()
        self.labels[1, :2] = self.labels[1, -3:] = IGNORE_INDEX

    def read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.ids[samples], self.labels[samples]

    def describe(self, sample: int) -> str:
        return f"token {10 * sample}"


def shown(corpus: Path, number: int) -> tuple[str, str]:
    tokenizer = TextTokenizer.load(corpus / "tokenizer.json")
    ids = [tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    [found] = peek(Few(ids), tokenizer, number, 1)
    return found


def test_first_id_is_given_and_the_rest_are_targets(corpus: Path):
    assert shown(corpus, 0) == ("sample 0: token 0; 7 targets", "⟦a⟧bcdefgh")


def test_what_is_no_target_is_marked_and_padding_is_counted(corpus: Path):
    head, text = shown(corpus, 1)
    assert head == "sample 1: token 10; 3 targets"
    assert text.startswith("⟦ab⟧cde⟦3 × padding, id ")


def test_command_shows_what_the_first_step_trains_on(lightning: Lightning, run_yaml: RunYaml):
    code, out, err = lightning("peek", "--config", run_yaml(), "--count", 2, "--step", 3)
    assert code == 0, err
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("sample ")] == [
        "sample 4", "sample 5",
    ]  # fmt: skip


def test_step_counts_the_samples_of_all_machines(lightning: Lightning, run_yaml: RunYaml):
    config = run_yaml({"trainer.num_nodes": 2})
    code, out, err = lightning("peek", "--config", config, "--count", 1, "--step", 3)
    assert code == 0, err
    assert "\nsample 8: " in out


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--count", 0, "--count is 0: must be at least 1"),
        ("--step", 0, "--step is 0: steps are counted from 1"),
    ],
)
def test_bad_option_is_refused(
    lightning: Lightning, run_yaml: RunYaml, option: str, value: int, text: str
):
    code, _, err = lightning("peek", "--config", run_yaml(), option, value)
    assert (code, err) == (2, f"error: {text}\n")


def test_row_without_any_target_is_all_padding(corpus: Path):
    tokenizer = TextTokenizer.load(corpus / "tokenizer.json")
    samples = Few([1, 2, 3])
    samples.labels[:] = IGNORE_INDEX
    [(head, text)] = peek(samples, tokenizer, 0, 1)
    assert (head, text) == ("sample 0: token 0; 0 targets", "⟦3 × padding, id 3⟧")
