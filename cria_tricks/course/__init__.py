"""What the lessons share: the course's job with its memory bill so far, figures, and the checks of exercises."""

from cria_tricks.course.drawing import DARK, LIGHT, Sketch, figure, show, staircase
from cria_tricks.course.exercises import CHECKS, about, check, equal
from cria_tricks.course.job import CAPSTONE, LESSON_OF, bill, show_bill, so_far
from cria_tricks.course.measured import on_a_gpu

__all__ = [
    "CAPSTONE",
    "CHECKS",
    "DARK",
    "LESSON_OF",
    "LIGHT",
    "Sketch",
    "about",
    "bill",
    "check",
    "equal",
    "figure",
    "on_a_gpu",
    "show",
    "show_bill",
    "so_far",
    "staircase",
]
