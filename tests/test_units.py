"""Times and money as people write them."""

import random
import re

import pytest
import torch

from cria_tricks.common.units import DTYPE, duration, human, money

SECONDS = {"s": 1, "min": 60, "h": 3600, "days": 86_400, "years": 365 * 86_400}


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (-1023, "-1023 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (2**20 - 1, "1024.0 KiB"),
        (2**20, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**40, "1.0 TiB"),
        (3 * 2**50, "3072.0 TiB"),
    ],
)
def test_bytes_are_said_in_the_unit_that_suits_them(size, said):
    assert human(size) == said


def test_our_names_of_precisions_are_torchs():
    assert [getattr(torch, name).itemsize for name in DTYPE.values()] == [4, 2, 2]
    assert list(DTYPE) == ["fp32", "fp16", "bf16"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "less than 0.1 s"),
        (0.049, "less than 0.1 s"),
        (0.05, "0.1 s"),
        (8.24, "8.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1.0 min"),
        (329, "5.5 min"),
        (2.21e3, "37 min"),
        (119.4 * 60, "119 min"),
        (119.6 * 60, "2 h"),
        (7800, "2 h 10 min"),
        (10 * 3600, "10 h"),
        (47 * 3600 + 59 * 60, "47 h 59 min"),
        (48 * 3600, "2 days"),
        (729 * 86_400, "729 days"),
        (730 * 86_400, "2 years"),
        (170_776_869 * 60, "325 years"),
        (4e12, "126,839 years"),
    ],
)
def test_a_time_is_said_in_the_unit_that_suits_it(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("usd", "said"),
    [
        (0.0, "less than a cent"),
        (0.0099, "less than a cent"),
        (0.01, "$0.01"),
        (0.0365, "$0.04"),
        (0.4, "$0.40"),
        (12.345, "$12.35"),
        (99.994, "$99.99"),
        (99.996, "$100"),
        (1234.5, "$1,235"),
        (1423140.58, "$1,423,141"),
    ],
)
def test_an_amount_is_said_in_cents_or_in_dollars(usd, said):
    assert money(usd) == said


def test_what_is_said_is_the_number_but_for_its_rounding():
    draw = random.Random(25)
    for _ in range(3000):
        seconds = 10 ** draw.uniform(0, 12)
        said = duration(seconds)
        read = sum(float(n.replace(",", "")) * SECONDS[unit] for n, unit in re.findall(r"([\d.,]+) (\w+)", said))
        last = 60 if " h" in said else SECONDS[said.split()[-1]] / (10 if "." in said else 1)
        assert abs(read - seconds) <= 0.5001 * last, (seconds, said)
        assert max(map(int, re.findall(r"\d+", said.replace(",", "")))) < 730 or said.endswith("years"), said
        usd = 10 ** draw.uniform(-2, 9)
        assert abs(float(money(usd)[1:].replace(",", "")) - usd) <= (0.00501 if usd < 99 else 0.501)
