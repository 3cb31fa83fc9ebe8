"""The course's lessons in their order: titles, navigation, ladders and notebooks take a lesson's number from here."""

PARTS: dict[str, tuple[str, ...]] = {
    "One card": (
        "the_bill",
        "lora",
        "flash_attention",
        "gradient_checkpointing",
        "chunked_loss",
        "mixed_precision",
        "nf4",
        "optimizers",
        "gradient_accumulation",
        "packing",
        "fused_lora",
        "a_full_card",
        "when_libraries_lie",
        "checkpoint_and_resume",
        "kwanzaa",
    ),
    "Deeper": (
        "int8",
        "flash_decoding",
        "long_rows",
        "weights_elsewhere",
        "choose_your_hardware",
    ),
    "Beyond one card": (
        "data_parallel",
        "sharding",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "hybrid",
        "interconnect",
        "many_cards",
    ),
    "At scale": ("data_at_scale", "monitoring", "jobs_and_elasticity"),
}
"""The names of the lessons' files, by the part of the course."""

LESSONS: tuple[str, ...] = tuple(name for names in PARTS.values() for name in names)
"""All lessons. Lesson 0 is the first."""


def number_of(lesson: str) -> int:
    """Return a lesson's number.

    Args:
        lesson: the name of its file, such as ``nf4``.

    Raises:
        ValueError: if there is no such lesson.
    """
    if lesson not in LESSONS:
        raise ValueError(f"{lesson!r} is no lesson; the lessons are {', '.join(LESSONS)}")
    return LESSONS.index(lesson)
