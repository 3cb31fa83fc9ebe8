"""The estimate folded over letters is the estimate of any numbers."""

import random

import pytest

from cria_tricks.bill.constants import TOKENS_PER_CHUNK
from cria_tricks.bill.formula import Formula, at_most, chunks, largest
from cria_tricks.bill.moments import moments
from cria_tricks.bill.step_time import counts
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from cria_tricks.settings import Tricks
from cria_tricks.tricks.folds import estimate, facts, work
from tools import fit


def value(formula, batch, tokens, k):
    """What a formula is for some numbers."""
    letters = {"B": batch, "T": tokens, "k": k}
    letters |= {"m": min(TOKENS_PER_CHUNK, batch * (tokens - 1)), "c": -(-batch * tokens // TOKENS_PER_CHUNK)}
    if not isinstance(formula, Formula):
        return formula
    found = []
    for polynomial in formula.polynomials or [{}]:
        found.append(0)
        for name, number in polynomial.items():
            for letter in name:
                number *= letters[letter]
            found[-1] += number
    return max(found)


def test_arithmetic():
    batch, tokens = Formula.letter("B", 3), Formula.letter("T", 10)
    n = batch * tokens
    assert (2 * n * tokens + n - 5 + 7 * (batch > 2)).polynomials == [{"BTT": 2, "BT": 1, "": 2}]
    assert (n * 8 // 4).polynomials == [{"BT": 2}]
    both = largest(n * 2, n + 40) + 1
    assert both.polynomials == [{"BT": 2, "": 1}, {"BT": 1, "": 41}]
    assert (both.sample, value(both, 3, 10, 1), value(both, 30, 10, 1)) == (71, 71, 601)
    assert largest(3, 7) == 7
    assert not n * 0
    assert (at_most(256, n).polynomials, chunks(n * 1.0, 256).polynomials) == ([{"m": 1}], [{"c": 1}])


def test_what_is_no_formula_is_refused_and_not_rounded():
    n = Formula.letter("B", 3)
    with pytest.raises(AssertionError, match="rounded"):
        _ = 3 * n // 2
    with pytest.raises(AssertionError, match="nothing is known"):
        _ = 1 - largest(n, n * n)


def test_bytes_and_work_of_any_numbers_are_those_of_the_formulas():
    """All models and cards, all switches at random: each moment's largest point, each part of the time."""
    draw, tried = random.Random(0), 0
    while tried < 150:
        tricks = {name: draw.choice(values) for name, values in fit.VALUES.items()}
        batch, tokens, k = draw.choice((1, 2, 5)), draw.choice((8, 200, 5000)), draw.choice((1, 2, 8))
        card, shape = draw.choice(list(CARDS.values())), find_shape(draw.choice(fit.MODELS))
        bare = Recipe(tricks=Tricks(**tricks, gradient_accumulation=k))
        named = {"lora": {"target_modules": list(shape.packable)}}
        numbers = {"train": {"batch_size": batch}, "data": {"max_length": tokens}, **named}
        recipe = Recipe.model_validate({**bare.model_dump(), **numbers})
        try:
            resolve(recipe, card.device)
        except BadInput:
            continue
        longest = tokens + 16 * (tricks["peft"] == "prompt_tuning")  # the learnt prompt's vectors are positions, too
        seen = fit.windowed(shape, shape.window <= longest)
        letters = fit.plain(seen, **tricks, accumulates=k > 1, several=batch > 1)
        largest_of, wanted = {}, {}  # a side network has two of the name "forward"
        for moment in moments(facts(letters, seen, card.device), every_point=True):
            size = value(sum(line.bytes for line in moment.lines) + Formula([{}], 0), batch, tokens, k)
            largest_of[moment.name] = max(size, largest_of.get(moment.name, 0))
        for moment in estimate(recipe, shape, card.device).moments:
            wanted[moment.name] = max(moment.bytes, wanted.get(moment.name, 0))
        assert largest_of == wanted
        both = (counts(work(one, at, card.device)) for one, at in ((letters, seen), (recipe, shape)))
        for ours, theirs in zip(*both, strict=True):
            assert ours.name == theirs.name
            assert [value(size, batch, tokens, k) for size in ours[1:4]] == pytest.approx(list(theirs[1:4]), rel=1e-12)
        tried += 1


def test_what_is_left_out_can_never_be_the_largest():
    """Of a part's row lists only those stay that are the largest for some numbers, and for these they do."""
    shape = find_shape("llama-3.2-1b")
    checkpointed = {"gradient_checkpointing": True, "several": True}
    letters = fit.plain(shape, precision="fp16", peft="lora", quantization="nf4", **checkpointed)
    memory = facts(letters, shape, fit.OLD.device)
    whole = fit._rows(memory, fit.INSIDE, "last block")
    stays = fit._that_can_be_largest(whole)
    assert 1 < len(stays) < len(whole)
    for batch, tokens in ((1, 8), (1, 100), (2, 8), (2, 2048), (64, 512), (1, 131_072)):
        most = [max(sum(value(size, batch, tokens, 1) for _, size in rows) for rows in part) for part in (whole, stays)]
        assert most[0] == most[1]


def test_switches_that_do_not_go_together_are_told_apart():
    found = [(one["when"], one["says"]) for one in fit.refusals()]
    assert {"peft": "none", "quantization": "nf4"} in [when for when, _ in found]
    assert {"card": "t4", "precision": "bf16"} in [when for when, _ in found]
    batches = [when for when, says in found if "train.batch_size={B}" in says]
    new = ["l4", "a10g", "l40s", "rtx3060", "rtx3090", "rtx4060ti", "rtx4090", "a100", "a100-80", "h100"]
    assert [when.pop("card") for when in batches] == new
    assert batches == len(new) * [{"several": True, "attention": "flash_attention_2", "packing": True}]
