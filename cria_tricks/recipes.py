"""The built-in recipes, one function each: ``cria train smoke`` calls ``smoke()``.

Each function takes the device that will train, because precision and other settings depend on it. None means this
machine. :func:`baseline` is the same for every device.
"""

from collections.abc import Callable
from pathlib import Path

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import hint, nearest, same
from cria_tricks.hardware import Device, this_device
from cria_tricks.models.catalogue import ALIASES, short_name
from cria_tricks.recipe import Recipe, from_toml, with_settings
from cria_tricks.settings import Data, Lora, Train, Tricks

ROOM = 21 * 2**29
"""A GPU of this memory holds the Kwanzaa run without saving memory, with a margin: 10.5 GiB [bytes]."""


def smoke(device: Device | None = None) -> Recipe:
    """A quick test: QLoRA of SmolLM2-135M on the 32 short rows of ``nguzo_saba``, in minutes on two CPU cores."""
    return Recipe(
        name="smoke",
        model="smollm2",
        data=Data(train="nguzo_saba", max_length=1024),
        tricks=Tricks(
            gradient_accumulation=4,
            precision=best_precision(device),
            quantization="nf4",
            double_quantization=True,
            peft="lora",
            attention="sdpa",
            chunked_loss=True,
        ),
        # 32 rows are 8 steps, so it evaluates twice.
        train=Train(learning_rate=1e-3, eval_steps=4),
    )


def qlora(device: Device | None = None) -> Recipe:
    """QLoRA of any model on your own rows: 4-bit frozen weights, and every switch on that saves much memory.

    This is what a run of your own starts from: ``cria train qlora --set model=NAME --set data.train=mine.jsonl --set
    data.eval=held_out.jsonl``. On a card with more room, ``--fit fastest`` leaves out what is not needed there.
    """
    device = device or this_device()
    return Recipe(
        name="qlora",
        tricks=Tricks(
            gradient_accumulation=8,
            gradient_checkpointing=True,
            precision=best_precision(device),
            quantization="nf4",
            double_quantization=True,
            peft="lora",
            optimizer="adamw_8bit",
            paged_optimizer=True,
            attention="sdpa",
            expand_kv=device.needs_expand_kv,
            chunked_loss=True,
            # It saves memory, which a CPU has enough of, and rounds the norms to 16 bits.
            lean_preparation=device.kind == "cuda",
        ),
        train=Train(epochs=3),
    )


def lora(device: Device | None = None) -> Recipe:
    """LoRA of any model on your own rows, over frozen weights that are not quantized."""
    unquantized = ["tricks.quantization=none", "tricks.double_quantization=false"]
    return with_settings(qlora(device), ["name=lora", *unquantized])


def full(device: Device | None = None) -> Recipe:
    """Full fine-tuning of any model on your own rows: all weights train, so the rate is a tenth of an adapter's."""
    all_weights = ["tricks.peft=none", "tricks.chunked_loss=false", "tricks.lean_preparation=false"]
    return with_settings(lora(device), ["name=full", *all_weights, "train.learning_rate=2e-5"])


def kwanzaa(device: Device | None = None) -> Recipe:
    """The course's main example: QLoRA of Llama-3.2-1B-Instruct on 107 chat rows, for a free T4.

    The LoRA rank and alpha, the seven target modules, the batch size, the accumulation and the epochs are those of the
    public notebook that this course reproduces (github.com/AINative-Studio/kwanzaa). Several of them are the defaults
    of ``Recipe``, so they are not repeated here. The learning rate is not the notebook's 2e-4: ``tinker_cookbook``, of
    the authors of *LoRA Without Regret*, advises 5e-4 (2000 / D) ** 0.781 for a Llama of width D, and D is 2,048. The
    model name means the mirror
    ``unsloth/Llama-3.2-1B-Instruct``, which can be downloaded without accepting a licence. ``--set
    model=meta-llama/Llama-3.2-1B-Instruct`` takes the gated original.

    A GPU with :data:`ROOM` or more, such as a T4, can hold all that a step saves. There the recipe leaves out
    checkpointing and the chunked loss, because both save memory and cost time: this is the set that ``cria plan kwanzaa
    --fit fastest`` finds on a T4, but for ``fused_lora`` and ``fused_blocks``, which that also switches on and no T4
    has run yet. Where a setting of yours, such as another model or longer rows, needs more memory than there is, both
    stay on.
    """
    device = device or this_device()
    roomy = device.kind == "cuda" and device.memory_bytes >= ROOM
    return with_settings(
        qlora(device),
        [
            "name=kwanzaa",
            "model=llama-3.2-1b",
            "data.train=kwanzaa",
            "data.eval=kwanzaa",
            "train.learning_rate=5e-4",
            "train.save_steps=7",  # 107 rows, 8 a step: 14 steps an epoch, so it saves twice in each
            *(["tricks.gradient_checkpointing=false", "tricks.chunked_loss=false"] if roomy else []),
        ],
    )


def capstone(device: Device | None = None) -> Recipe:
    """The Kwanzaa recipe with every switch that the course teaches for it, which takes the fewest bytes.

    The lessons and the figures count with this one on all devices.
    """
    return with_settings(kwanzaa(device), ["tricks.gradient_checkpointing=true", "tricks.chunked_loss=true"])


def kwanzaa_small(device: Device | None = None) -> Recipe:
    """The Kwanzaa recipe on SmolLM2-135M, for a machine without a GPU.

    A CPU has memory for what a step of this model saves, so there it leaves out gradient checkpointing, which costs
    time, and fuses adapters and blocks.
    """
    device = device or this_device()
    on_a_cpu = ["tricks.gradient_checkpointing=false", *_fused(device)] if device.kind == "cpu" else []
    return with_settings(
        # A step takes a minute on two cores, so it saves more often.
        kwanzaa(device),
        ["name=kwanzaa_small", "model=smollm2", "train.save_steps=5", *on_a_cpu],
    )


def kwanzaa_curated(device: Device | None = None) -> Recipe:
    """The Kwanzaa recipe on rows that are worth learning: 38 real answers and refusals, and 357 rows of our own.

    Of the 107 real rows 65 announce an answer and give none. They are left out here, as are four that are nearly an
    evaluation row. The system prompt of every row shows the answer contract, so that the base can keep it, too.
    """
    return with_settings(
        kwanzaa(device),
        [
            "name=kwanzaa_curated",
            "data.train=kwanzaa_curated",
            "data.eval=kwanzaa_curated",
            "data.contract=true",
            "train.save_steps=25",  # 395 rows, 8 a step: 50 steps an epoch
        ],
    )


def kwanzaa_curated_small(device: Device | None = None) -> Recipe:
    """SmolLM2-135M on our own 357 questions over short notes, for a machine without a GPU.

    The rows of ``history_notes`` have about 490 tokens, so a model of this size can learn them on two cores. The rate
    is larger than the one for Llama, because smaller models take larger ones.
    """
    return with_settings(
        smoke(device),
        [
            "name=kwanzaa_curated_small",
            "data.train=history_notes",
            "data.eval=history_notes",
            "data.contract=true",
            "tricks.gradient_accumulation=1",
            *_fused(device or this_device()),
            "train.batch_size=4",
            "train.epochs=3",
            "train.eval_steps=0",
            "train.save_steps=45",  # 357 rows, 4 at a time: 90 steps an epoch
        ],
    )


def big_14b(device: Device | None = None) -> Recipe:
    """QLoRA of Qwen3-14B on the Kwanzaa rows for a free T4: its frozen blocks wait in a file, which leaves much room.

    By estimate, no T4 has run it: it needs 9.2 GiB of the card and 7.1 GiB of its host. The four micro-batches of a
    step go through each block together, so that each pass reads the file once for all four. With all blocks on the card
    it would need 12.3 GiB, which fits a T4 as well: ``--set tricks.stream_layers=false`` is faster where the disk is
    slow. The rate is that of ``kwanzaa``: for a Qwen of width D the same library advises 5e-4 (2000 / D) ** 0.0775,
    which is 4.6e-4 here.
    """
    return with_settings(
        capstone(device),
        [
            "name=big_14b",
            "model=qwen3-14b",
            "tricks.stream_layers=file",
            "tricks.layer_by_layer=true",
            "tricks.gradient_accumulation=4",
        ],
    )


def big_14b_small(device: Device | None = None) -> Recipe:
    """LoRA of SmolLM2-135M by the same two switches, for a machine without a GPU.

    The data are the 32 rows of ``smoke``, and the base is not quantised. The file keeps the blocks out of the memory.
    """
    return with_settings(
        smoke(device),
        [
            "name=big_14b_small",
            "tricks.quantization=none",
            "tricks.double_quantization=false",
            "tricks.gradient_checkpointing=true",
            "tricks.stream_layers=file",
            "tricks.layer_by_layer=true",
        ],
    )


def full_1b(device: Device | None = None) -> Recipe:
    """All weights of Llama-3.2-1B on a free T4, with rows of up to 1,024 tokens.

    By estimate, no T4 has run it: tensors take at most 11.3 GiB, in a dry run PyTorch's allocator reserves 11.8 GiB,
    and with an estimate of what it may reserve and CUDA's own memory ``cria plan`` counts 13.9 GiB. The weights and
    AdamW's 8-bit states take 8.4 GiB. So each weight takes its step in the backward pass, and no gradient waits. This
    rules out gradient accumulation, and a limit for the norm of all gradients.
    """
    device = device or this_device()
    return Recipe(
        name="full_1b",
        model="llama-3.2-1b",
        data=Data(train="history_notes", eval="history_notes", max_length=1024),
        tricks=Tricks(
            gradient_checkpointing=True,
            precision=best_precision(device),
            optimizer="adamw_8bit",
            optimizer_in_backward=True,
            attention="sdpa",
            expand_kv=device.needs_expand_kv,
        ),
        # All weights move, so the rate is a tenth of an adapter's.
        train=Train(learning_rate=2e-5, max_grad_norm=0),
    )


def full_1b_small(device: Device | None = None) -> Recipe:
    """All weights of SmolLM2-135M by the same switches, on the 32 rows of ``nguzo_saba``, without a GPU."""
    changes = ["name=full_1b_small", "model=smollm2", "data.train=nguzo_saba", "data.eval=nguzo_saba"]
    return with_settings(full_1b(device), changes)


def long_8b(device: Device | None = None) -> Recipe:
    """QLoRA of Llama-3.1-8B on a T4 with rows of 65,536 tokens, for a host with 29 GB of memory such as Kaggle's.

    By estimate, no T4 has run it: it needs 14.0 GiB of the card and 18.3 GiB of the host. Saved block inputs wait on
    the host, and the MLP takes 512 tokens at a time. Colab's host of 12.7 GB has room for ``--set
    data.max_length=32768``. The recipe packs documents of ``history_notes`` into such rows; for a long document of your
    own take ``--set data.train=book.txt --set tricks.packing=false``.
    """
    device = device or this_device()
    on_gpu = device.kind == "cuda"
    return Recipe(
        name="long_8b",
        model="llama-3.1-8b",
        data=Data(train="history_notes", eval="nguzo_saba", max_length=65_536),
        tricks=Tricks(
            gradient_checkpointing=True,
            precision=best_precision(device),
            quantization="nf4",
            double_quantization=True,
            peft="lora",
            optimizer="adamw_8bit",
            attention="sdpa",
            expand_kv=device.needs_expand_kv,
            packing=True,
            chunked_loss=True,
            lean_preparation=on_gpu,
            fused_lora=True,
            fused_blocks=True,
            tiled_mlp=512,
            activation_offload=on_gpu,
        ),
        lora=Lora(r=8, alpha=16),
    )


def long_8b_small(device: Device | None = None) -> Recipe:
    """QLoRA of SmolLM2-135M on packed rows of 8,192 tokens, two steps, for a machine without a GPU.

    The switches are those of ``long_8b``. On a CPU it leaves out the three that are for a GPU: ``expand_kv``,
    ``lean_preparation`` and ``activation_offload``.
    """
    changes = ["name=long_8b_small", "model=smollm2", "data.max_length=8192", "train.max_steps=2"]
    return with_settings(long_8b(device), [*changes, "train.learning_rate=5e-4"])


def _fused(device: Device) -> list[str]:
    """Fuse adapters and blocks on a CPU, where both are equal to the plain path; no T4 has run them yet."""
    fused = str(device.kind == "cpu")
    return [f"tricks.fused_lora={fused}", f"tricks.fused_blocks={fused}"]


def baseline(device: Device | None = None) -> Recipe:
    """The baseline with every switch off: fp32 full fine-tuning of SmolLM2-135M on the rows of ``nguzo_saba``."""
    return Recipe(name="baseline", model="smollm2", data=Data(max_length=1024), train=Train(learning_rate=2e-5))


_ALL = (
    *(smoke, qlora, lora, full, kwanzaa, kwanzaa_small, kwanzaa_curated, kwanzaa_curated_small, baseline),
    *(full_1b, full_1b_small, long_8b, long_8b_small, big_14b, big_14b_small),
)
NAMED: dict[str, Callable[..., Recipe]] = {recipe.__name__: recipe for recipe in _ALL}
"""Recipe name -> the function that makes the recipe."""

STARTERS = ("qlora", "lora", "full")
"""The recipes for a model and rows of your own. Theirs are only examples, so ``cria plan`` searches their switches."""


def get(recipe: Recipe | str | Path, device: Device | None = None) -> Recipe:
    """Return the recipe with this name, or read one from a TOML file.

    Args:
        recipe: a name (letter case does not matter), a path that ends with ``.toml``, or a ``Recipe``, which is
            returned unchanged.
        device: the device that will train; a named recipe chooses its precision and a few switches for it. None means
            this machine.

    Raises:
        BadInput: if no recipe has this name (the message suggests the nearest name), or if the file is not valid.

    Examples:
        >>> get("Kwanzaa_Small").model
        'smollm2'
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):
        raise BadInput(f"recipe {recipe!r}: must be a Recipe, the name of one, or the path of a .toml file")
    if isinstance(recipe, Path) or recipe.endswith(".toml"):
        return from_toml(recipe)
    name = same(recipe, NAMED)
    if name:
        return NAMED[name](device)
    if short_name(recipe) in ALIASES:
        raise BadInput(f"unknown recipe {recipe}: it is a model; name the recipe qlora with --set model={recipe}")
    there_are = f"there are {', '.join(NAMED)}, or name a .toml file"
    raise BadInput(f"unknown recipe {recipe}: {hint(nearest(recipe, NAMED), there_are)}")


def best_precision(device: Device | None) -> str:
    """Return ``bf16`` where the hardware supports it natively, else ``fp16`` on a GPU and ``fp32`` on a CPU."""
    return (device or this_device()).best_precision
