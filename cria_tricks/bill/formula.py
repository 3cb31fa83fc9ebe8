r"""Sizes as formulas: the bill by hand, once for all batches and lengths.

The estimate is plain arithmetic on a batch B, a length T and an accumulation k. Given formulas for these in place of
numbers, the same code gives formulas: polynomials with whole coefficients and, where it takes the larger of two sizes,
several of them, of which the largest counts. What a polynomial cannot say has a letter of its own, defined in
:data:`RULES`. So the page "Will it fit?" moves without Python, and no formula is written twice.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

Polynomial = Mapping[str, float]
"""Coefficients by monomial: ``{"BTT": 128, "": 5}`` is 128 B T T + 5."""

RULES = {"m": "min(chunk, B (T - 1))", "c": "ceil(B T / chunk)"}
"""Letters that stand for a rounding: logits of at most a chunk are alive at once, and a chunk is begun or it is not."""


class Formula:
    """The largest of some polynomials, and what it is for a sample.

    Comparisons are answered for the sample: they decide which formula it is, as a mask does that only batches have.

    Args:
        polynomials: of which the largest counts.
        sample: the number that it is for one choice of the letters.
    """

    def __init__(self, polynomials: Iterable[Polynomial], sample: float):
        self.polynomials: list[Polynomial] = []
        for one in polynomials:
            nonzero = {name: number for name, number in one.items() if number}
            if nonzero not in self.polynomials:
                self.polynomials.append(nonzero)
        self.sample = sample

    @classmethod
    def letter(cls, name: str, sample: float) -> "Formula":
        """A letter alone."""
        return cls([{name: 1}], sample)

    def __add__(self, other: Any) -> "Formula":
        if not isinstance(other, Formula) and not other:
            return self  # as each sum begins
        other = _formula(other)
        pairs = itertools.product(self.polynomials, other.polynomials)
        sums = [{name: one.get(name, 0) + two.get(name, 0) for name in {**one, **two}} for one, two in pairs]
        return Formula(sums, self.sample + other.sample)

    def __mul__(self, other: Any) -> "Formula":
        if not isinstance(other, Formula):  # the quick way, because most factors are numbers
            return Formula(
                [{name: x * other for name, x in one.items()} for one in self.polynomials], self.sample * other
            )
        products = []
        for one, two in itertools.product(self.polynomials, other.polynomials):
            products.append(dict[str, float]())
            for (a, x), (b, y) in itertools.product(one.items(), two.items()):
                name = "".join(sorted(a + b))
                products[-1][name] = products[-1].get(name, 0) + x * y
        return Formula(products, self.sample * other.sample)

    __radd__ = __add__
    __rmul__ = __mul__

    def __sub__(self, other: Any) -> "Formula":
        return self + -1 * _single(other)  # less the largest of two is not the largest of less

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
    """The largest of some numbers or formulas."""
    if not any(isinstance(size, Formula) for size in sizes):
        return max(sizes)
    found = [_formula(size) for size in sizes]
    return Formula(itertools.chain(*(one.polynomials for one in found)), max(one.sample for one in found))


def at_most(chunk: int, tokens: Any) -> Any:
    """Tokens whose logits are alive at once, of B (T - 1)."""
    return Formula.letter("m", min(chunk, tokens.sample)) if isinstance(tokens, Formula) else min(chunk, tokens)


def chunks(tokens: Any, chunk: int) -> Any:
    """How many chunks there are in B T."""
    if isinstance(tokens, Formula):
        return Formula.letter("c", -(-int(tokens.sample) // chunk))
    return -(-int(tokens) // chunk)


def _formula(size: Any) -> Formula:
    return size if isinstance(size, Formula) else Formula([{"": size}], size)


def _single(size: Any) -> Formula:
    found = _formula(size)
    assert len(found.polynomials) <= 1, "nothing is known of less than the largest of several"
    return found
