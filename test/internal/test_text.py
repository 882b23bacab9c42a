"""Parts of messages and tables."""

from __future__ import annotations

import pytest
import torch

from weight_update import SchemaMismatchError, SyncReport, WeightSchema
from weight_update.strategy.named_weights import NamedWeights
from weight_update.text import brief, format_number, format_seconds, format_size, plural

ONE = {"weight": torch.zeros(2)}
OTHER = {"weight": torch.zeros(3)}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (19_240_000, "19.2 MB"),
        (2_500_000_000, "2.5 GB"),
        (1_540_000_000_000, "1.54 TB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [(0.01234, 3, "0.0123"), (999.4, 3, "999"), (999.6, 3, "1000"), (12345.6, 4, "12346"), (240.0, 2, "240")],
)
def test_a_number_has_no_exponent(number: float, digits: int, text: str) -> None:
    assert format_number(number, digits) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.99999, "3 s"),
        (0.2499, "0.25 s"),
        (1.26, "1.3 s"),
        (0.0, "0 s"),
        (119.96, "120 s"),
        (1800.0, "1800 s"),
    ],
)
def test_a_time_is_rounded(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_one_thing_is_singular() -> None:
    assert [plural(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    assert "applied by 1 worker;" in f"{SyncReport(1, 'dense', apply_seconds={0: 0.1})};"
    with pytest.raises(SchemaMismatchError, match=r"\(1 difference\):"):
        WeightSchema.of(ONE).require_same(WeightSchema.of(OTHER), "worker 1")
    with pytest.raises(SchemaMismatchError, match=r"\(1 difference\):"):
        NamedWeights(OTHER).require_agreed(WeightSchema.of(ONE), more=False)
    with pytest.raises(SchemaMismatchError, match=r"\(2 differences\):"):
        WeightSchema.of(ONE).require_same(WeightSchema.of({"other": ONE["weight"]}), "worker 1")


def test_an_error_in_one_line() -> None:
    error = RuntimeError("[../third_party/gloo/pair.cc:534] Connection closed by peer\nmore")
    assert brief(error) == "Connection closed by peer"
    assert brief("plain") == "plain"
