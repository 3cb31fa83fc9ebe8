"""Plain names of cases for tables, because a case's own name is a word of the code."""

NAMES = {
    ("flash_decoding", "eager"): "eager attention",
    ("flash_decoding", "off"): "sdpa",
    ("flash_decoding", "on"): "sdpa in pieces",
    ("gradient_accumulation", "off"): "1 micro-batch of 4 rows",
    ("gradient_accumulation", "half"): "2 micro-batches of 2 rows",
    ("gradient_accumulation", "on"): "4 micro-batches of 1 row",
    ("peers", "small"): "ours, small",
    ("peers", "fast"): "ours, fast, compiled",
    ("peers", "bare_as_small"): "a plain PyTorch loop, as small",
    ("peers", "trl_as_small"): "TRL, as small",
    ("peers", "trl_smallest"): "TRL, as small, with its offload",
    ("peers", "trl_as_fast"): "TRL, as fast",
    ("peers", "trl_fastest"): "TRL, as fast, compiled",
    ("peers", "unsloth"): "Unsloth",
}
"""Bench and case -> what a table calls the case, where its own name says too little."""


def plain_name(bench: str, name: str) -> str:
    """Return what a table calls a case: a rung of the ladder by the switch that it adds, others by :data:`NAMES`.

    Examples:
        >>> plain_name("together", "ladder_peft"), plain_name("nf4", "double")
        ('+ peft', 'double')
    """
    if name.startswith("ladder_"):
        return f"+ {name.removeprefix('ladder_')}"
    return NAMES.get((bench, name), name)
