r"""Compute with formulas in place of numbers, so that one estimate holds for all batch sizes and row lengths.

The estimate is plain arithmetic on B rows of a micro-batch, T tokens of a row and k micro-batches of a step. If it gets
formulas in place of these numbers, the same code returns formulas: polynomials in B, T and k. Where the code takes the
larger of two sizes, the formula holds several polynomials, and the largest of their values counts. What a polynomial
cannot express has a letter of its own, defined in :data:`RULES`. The page "Will it fit?" puts numbers into these
formulas in the browser, without Python, so no formula has to be written twice.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

Polynomial = Mapping[str, float]
"""Monomial, its letters in alphabetical order -> coefficient: ``{"BTT": 128, "": 5}`` is 128 B T^2 + 5."""

RULES = {"m": "min(chunk, B (T - 1))", "c": "ceil(B T / chunk)"}
"""Letters for what is no polynomial: m, the tokens whose logits are alive at once; c, the number of chunks.

The chunked loss computes the logits of one chunk of trained tokens at a time. The bill leaves out the first token of
each row, which has no label, so m has T - 1. The estimate of time takes every token as trained, so c has T.
"""


class Formula:
    """A size as a formula: the largest of some polynomials, with its value for one sample of the letters.

    Comparisons (``<`` and ``>``) compare the values for the sample. So the sample decides which branch of the code
    makes the formula. For example only batches of several rows have a mask, so B = 1 has another formula than B >= 2.

    Args:
        polynomials: the value of the formula is the largest of their values.
        sample: the value for one choice of the letters.
    """

    def __init__(self, polynomials: Iterable[Polynomial], sample: float):
        self.polynomials: list[Polynomial] = []
        for one in polynomials:
            nonzero = one if all(one.values()) else {name: number for name, number in one.items() if number}
            if nonzero not in self.polynomials:
                self.polynomials.append(nonzero)
        self.sample = sample

    @classmethod
    def letter(cls, name: str, sample: float) -> "Formula":
        """Return the formula of a single letter."""
        return cls([{name: 1}], sample)

    def __add__(self, other: Any) -> "Formula":
        if not isinstance(other, Formula) and not other:
            return self  # plus 0, with which sum() begins
        other = _formula(other)
        sums = []
        # max(a, b) + max(c, d) is the largest of all pairs: a + c, a + d, b + c, b + d.
        for one, two in itertools.product(self.polynomials, other.polynomials):
            sums.append(dict(one))
            for name, number in two.items():
                sums[-1][name] = sums[-1].get(name, 0) + number
        return Formula(sums, self.sample + other.sample)

    def __mul__(self, other: Any) -> "Formula":
        if not isinstance(other, Formula):  # most factors are numbers, so this way is kept fast
            return Formula(
                [{name: x * other for name, x in one.items()} for one in self.polynomials], self.sample * other
            )
        products = []  # of all pairs, as in a sum, because no size is negative
        for one, two in itertools.product(self.polynomials, other.polynomials):
            products.append(dict[str, float]())
            for (a, x), (b, y) in itertools.product(one.items(), two.items()):
                name = "".join(sorted(a + b))
                products[-1][name] = products[-1].get(name, 0) + x * y
        return Formula(products, self.sample * other.sample)

    __radd__ = __add__
    __rmul__ = __mul__

    def __sub__(self, other: Any) -> "Formula":
        return self + -1 * _single(other)  # -max(a, b) is not max(-a, -b)

    def __rsub__(self, other: Any) -> "Formula":
        return _formula(other) - self

    def __pow__(self, power: int) -> "Formula":
        return self if power == 1 else self * self ** (power - 1)

    def __floordiv__(self, whole: int) -> "Formula":
        assert all(number % whole == 0 for one in self.polynomials for number in one.values()), "it would be rounded"
        return Formula([{name: number // whole for name, number in one.items()} for one in self.polynomials],
                       self.sample // whole)  # fmt: skip

    def __bool__(self) -> bool:
        return any(self.polynomials)

    def __lt__(self, other: Any) -> bool:
        return self.sample < _formula(other).sample

    def __gt__(self, other: Any) -> bool:
        return self.sample > _formula(other).sample


def largest(*sizes: Any) -> Any:
    """Return the largest of some numbers or formulas."""
    if not any(isinstance(size, Formula) for size in sizes):
        return max(sizes)
    found = [_formula(size) for size in sizes]
    return Formula(itertools.chain(*(one.polynomials for one in found)), max(one.sample for one in found))


def at_most(chunk: int, tokens: Any) -> Any:
    """Return how many tokens have logits at once, at most ``chunk``. For a formula, which must be B (T - 1), m."""
    return Formula.letter("m", min(chunk, tokens.sample)) if isinstance(tokens, Formula) else min(chunk, tokens)


def chunks(tokens: Any, chunk: int) -> Any:
    """Return the number of chunks, rounded up. For a formula, which must be B T, c."""
    # // rounds down; between two minus signs it rounds up. Trained tokens are a float (tokens x trained share), and the
    # number of chunks must be an int.
    if isinstance(tokens, Formula):
        return Formula.letter("c", -(-int(tokens.sample) // chunk))
    return -(-int(tokens) // chunk)


def _formula(size: Any) -> Formula:
    return size if isinstance(size, Formula) else Formula([{"": size}], size)


def _single(size: Any) -> Formula:
    """Return a size as a formula with one polynomial, which can be subtracted."""
    found = _formula(size)
    assert len(found.polynomials) <= 1, "nothing is known of less than the largest of several"
    return found
