"""What the lessons share: the course's job with its memory bill, figures, predictions, and the checks of exercises."""

from cria_tricks.course.drawing import DARK, LIGHT, NARROW_DARK, NARROW_LIGHT, Sketch, figure, ladder, show
from cria_tricks.course.exercises import CHECKS, about, check, equal
from cria_tricks.course.job import CAPSTONE, LESSON_OF, bill, show_bill, show_worth, so_far
from cria_tricks.course.measured import on_a_gpu
from cria_tricks.course.notebook import show_table
from cria_tricks.course.predictions import NO_GUESS, PREDICTION, reveal, trend
from cria_tricks.models import peft_probes

__all__ = [
    "CAPSTONE",
    "CHECKS",
    "DARK",
    "LESSON_OF",
    "LIGHT",
    "NARROW_DARK",
    "NARROW_LIGHT",
    "NO_GUESS",
    "PREDICTION",
    "Sketch",
    "about",
    "bill",
    "check",
    "equal",
    "figure",
    "ladder",
    "on_a_gpu",
    "reveal",
    "show",
    "show_bill",
    "show_table",
    "show_worth",
    "so_far",
    "trend",
]

peft_probes.ignore_unusable()  # because lessons call peft themselves
