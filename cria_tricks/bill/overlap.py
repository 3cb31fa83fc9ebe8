"""Tell from which row on copies that overlap with the computing take no time, from the rates of the card."""

from dataclasses import replace

from cria_tricks.bill import launches, products, step_time
from cria_tricks.bill.work import Work
from cria_tricks.hardware.cards import Card

LONGEST = 2**20
"""The longest row that is tried [tokens]."""


def least_tokens(work: Work, card: Card) -> int:
    """Return the tokens of the shortest micro-batch whose copies take no time, by bisection.

    Shorter ones wait for the host, which starts one kernel after the other: there each copy delays all kernels behind
    it. Much longer rows compute more for each token, in attention, but a token's input stays as large. So if copies are
    hidden at one length, they are at all greater ones.

    Args:
        work: a step with ``travelling_blocks``; the length of its rows does not matter.
        card: the card and its rates.

    Returns:
        Tokens of all rows of the micro-batch, learnt prompt vectors included; those of rows of :data:`LONGEST` tokens
        if no length is enough.
    """
    least, most = 1, LONGEST
    while least < most:
        middle = (least + most) // 2
        if hidden(replace(work, tokens=middle), card):
            most = middle
        else:
            least = middle + 1
    return replace(work, tokens=most).positions


def hidden(work: Work, card: Card) -> bool:
    """Tell whether the blocks keep the card busy for longer than copies and launches take."""
    one = replace(work, micro_batches=1)
    timed = {part.name: step_time.timed(part, card, work.precision).seconds for part in step_time.counts(one)}
    busy = sum(timed[name] for name in step_time.BLOCKS)
    started = launches.of_blocks(one, products.blocks(one)) + launches.TRAVEL * work.travelling_blocks
    return busy >= max(timed[step_time.TRAVEL], started * card.reached.launch)
