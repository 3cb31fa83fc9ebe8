"""MFU: the operations that a token needs, against torch's own count and against PaLM's formula, and the peak."""

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from cria_tricks.hardware.cards import CARDS
from cria_tricks.hardware.device import T4, Device
from cria_tricks.measure.counting import flops
from cria_tricks.measure.utilisation import Utilisation, hardware_flops, model_flops, of_run
from cria_tricks.models.shape import find_shape, shape_of
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report.page import markdown
from cria_tricks.report.summary import utilisation
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from tests.test_report_page import made, run, summary

CPU = Device("cpu", "a processor", (0, 0), real_bf16=False, memory_bytes=T4.memory_bytes)
LLAMA = find_shape("llama-3.2-1b")
T = 512


def counted(*settings: str, card: str = "a100", tokens: int = T) -> tuple[float, float]:
    recipe = with_settings(Recipe(), [f"tricks.{one}" for one in settings])
    step = folds.step_of(recipe, LLAMA, CARDS[card].device, tokens)
    return model_flops(step), hardware_flops(step)


def test_without_recomputation_it_is_the_formula_of_palm():
    """6 N + 12 L H Q T a token: N weights in products, L blocks, H heads of Q numbers, T tokens; eager attention."""
    in_products = LLAMA.weights - LLAMA.width * (2 * LLAMA.layers + 1)  # the norms multiply no matrix
    palm = 6 * in_products + 12 * LLAMA.layers * LLAMA.query_width * T
    found, _ = counted("attention=eager")
    assert found == pytest.approx(palm, rel=1e-6)


def test_it_is_what_torch_counts_in_a_real_step():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    ids = model.dummy_inputs["input_ids"][:1, :4].repeat(1, 8)
    step = folds.step_of(Recipe(), shape_of(config.to_dict(), "tiny"), CPU, ids.shape[1])
    measured = flops(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward())
    assert model_flops(step) * ids.shape[1] == pytest.approx(measured, rel=1e-9)


def test_vectors_of_a_prompt_are_paid_by_the_tokens_of_the_text():
    """The tokens of a second are those of the text. 500 and 28 positions cost as much as 512 and 16."""

    def of_a_row(vectors: int, tokens: int) -> float:
        settings = ["tricks.peft=prompt_tuning", f"prompt.tokens={vectors}"]
        step = folds.step_of(with_settings(Recipe(), settings), LLAMA, CARDS["a100"].device, tokens)
        return tokens * hardware_flops(step)

    assert of_a_row(28, 500) == pytest.approx(of_a_row(16, 512), rel=1e-12)


def test_what_is_computed_again_counts_for_hfu_alone():
    on = ("peft=lora", "attention=sdpa", "precision=bf16")
    once, fused = counted(*on)
    again, more = counted(*on, "gradient_checkpointing=true")
    # Nothing more but the gradient of the first block's input, which checkpointing asks for.
    assert 0 <= again - once <= 2 * 3 * LLAMA.width * LLAMA.query_width
    blocks = sum(d_in * d_out for d_in, d_out in LLAMA.linears.values())
    assert 0.8 < (more - fused) / (2 * LLAMA.layers * blocks) < 1.1, "the blocks' forward pass, 2 operations a weight"
    # A fused kernel computes the scores a second time: one product, of half of all pairs.
    assert fused - once == pytest.approx(LLAMA.layers * LLAMA.query_width * T)


def test_the_peak_is_that_of_the_precision_on_all_cards_or_unknown():
    def peak(card: str, precision: str, *more: str, processes: int = 1) -> float | None:
        recipe = with_settings(Recipe(), [f"tricks.precision={precision}", *more])
        plan = resolve(recipe, CARDS[card].device)
        return of_run(plan, recipe, LLAMA, processes, T, 1.0).peak

    assert peak("t4", "fp16") == 65e12
    assert peak("t4", "fp32") == 8.1e12
    assert peak("t4", "fp16", processes=2) == 130e12
    assert peak("a100", "bf16") == 312e12
    recipe = Recipe()
    on_a_cpu = of_run(resolve(recipe, CPU), recipe, LLAMA, 1, T, 1.0)
    assert (on_a_cpu.peak, on_a_cpu.mfu(100.0), on_a_cpu.hfu(100.0)) == (None, None, None)
    assert on_a_cpu.model_flops > 6e9


def test_a_share_is_operations_a_second_over_the_peak():
    found = Utilisation(2e9, 3e9, 60e12)
    assert (found.mfu(3000), found.hfu(3000)) == (0.1, pytest.approx(0.15))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "unknown: the operations of this kind of model are not counted"),
        (Utilisation(1e9, 1e9, None), "unknown: no datasheet rate of this device"),
        (Utilisation(65e9, 65e9, 65e12), "15.0% of 65.0 TFLOP/s"),
    ],
)
def test_a_report_says_it_in_one_line(found, said):
    text = markdown(made(**utilisation(found, run())))
    assert f"| MFU, model FLOP utilisation | {said} |\n" in text
    assert summary(run())["tokens_per_second"] == 150.0
