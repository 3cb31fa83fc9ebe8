"""The course's lessons in their order: titles, navigation, ladders and notebooks take a lesson's number from here."""

PARTS: dict[str, tuple[str, ...]] = {
    "One card": (
        "the_bill",
        "mixed_precision",
        "gradient_accumulation",
        "gradient_checkpointing",
        "lora",
        "int8",
        "nf4",
        "adamw_8bit",
        "paged_optimizer",
        "flash_attention",
        "flash_decoding",
        "packing",
        "chunked_loss",
        "lean_preparation",
        "checkpoint_and_resume",
        "choose_your_hardware",
        "together",
        "kwanzaa",
        "when_libraries_lie",
        "allocated_is_not_reserved",
    ),
    "Beyond one card": (
        "data_parallel",
        "sharding",
        "tensor_parallel",
        "pipeline_parallel",
        "hybrid",
        "interconnect",
    ),
    "At scale": ("data_at_scale", "monitoring", "jobs_and_elasticity"),
    "How the fast ones are fast": ("fused_lora",),
    "Longer, larger, all of it": ("long_rows", "weights_elsewhere", "context_parallel", "many_cards"),
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
