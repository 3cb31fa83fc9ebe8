"""Every tolerance of the technique tests, with the measured noise it was sized to.

Noise is the largest difference over the cases of the tests that use a constant, absolute unless said otherwise, with
torch 2.13 on one thread of a Xeon at 2.5 GHz (2026-11-21). A tolerance is at least twice the noise where no issue sets
a tighter bound: other processors sum in another order. Not listed is what must be equal bit for bit.
"""

import torch

# expand_kv: outputs and gradients up to 5.7, repeated heads against shared ones and against plain attention.
EXPAND_KV = {
    torch.float64: 1e-12,  # noise 1.2e-15
    torch.float32: 1e-5,  # noise 8.0e-7; 0 in the logits and gradients of the two-layer model
    torch.bfloat16: 2**-4,  # noise 2**-5, one rounding step of a number between 4 and 8
}

# flash_attention: outputs and gradients up to 8.6, the reference against plain attention and torch's kernel.
FLASH_ATTENTION = {
    torch.float64: 1e-12,  # noise 5.3e-15; the bound that issue 4 sets
    torch.float32: 1e-5,  # noise 2.4e-6
    torch.float16: 2**-7,  # noise 2**-8, one rounding step of a number between 4 and 8
    torch.bfloat16: 2**-3,  # noise 2**-4, one rounding step of a number between 8 and 16
}

# flash_decoding: outputs up to 0.93, split against plain attention and torch's kernel.
FLASH_DECODING = {
    torch.float64: 1e-12,  # noise 6.7e-16
    torch.float32: 1e-5,  # noise 6.0e-7
    torch.float16: 2**-9,  # noise 6.1e-4, the rounding of plain attention's own intermediate steps
    torch.bfloat16: 2**-7,  # noise 2**-8, one rounding step of a number between 0.5 and 1
}

# packing: float64 sums of up to 64 products in another order.
PACKED_ATTENTION = 1e-14  # noise 2e-16

# packing: fp32 losses near 6 whose sums run over rows of another length.
PACKED_LOSS = 1e-6  # noise 5e-7

# chunked_loss: losses relative, gradients by the length of the difference over the gradient's.
CHUNKED_LOSS = 1e-6  # sums in another order leave 2.4e-7
CHUNKED_GRADIENT = 2e-6  # 5e-7 for the hidden states; 9.3e-7 for the tiny Llama's adapters below them
CHUNKED_DERIVATIVE = 1e-3  # a fp32 sum near 40 rounds to 4e-6: over two steps of 1e-2, 2e-4
CHUNKED_AUTOCAST = 1e-3  # bf16 logits move the mean of 40 losses by 4e-5
# A log-sum-exp near 24 is rounded by up to 2**-20 in fp32; of the 0.001 that the label lacks that is 1e-3. The small
# probabilities, lifted into fp16, are rounded by 2**-11 of themselves.
CHUNKED_SMALL_FP16 = 2e-3  # noise 8.8e-4

# gradient_accumulation: the difference of two gradients, over the gradient, by their lengths.
ACCUMULATED_GRADIENT = 1e-6  # 1.6e-7 on the toy, 5.8e-7 on the tiny Llama, whose one batch is 6.5e-7 from float64

# compile: results and gradients of pointwise chains, up to 8; a model's mean loss near 6.
COMPILED = 1e-5  # noise 9.5e-7
COMPILED_MODEL = 1e-5  # noise 9.5e-7

# trajectories: losses near 5 over 20 steps. A last bit of the adapters' first weights turned moves them by 3.8e-6.
# All toggles together round otherwise in every operation: 3.8e-5 to 6.1e-5 with the fused AdamW, by processor setting
# (AVX2, AVX512, AVX512 with bf16, no vectors; one and two threads).
TRAJECTORY = 1.2e-4  # noise 6.1e-5

# adamw_8bit: how much further than the nearest level bitsandbytes may go on a CPU, over a block's largest number.
ADAMW_8BIT_TABLE = 2**-15  # noise 3.04e-5 of 3.05e-5: the width of one of its table's 65,536 entries
# adamw_8bit: weights after 200 steps against 32 bits, over their length: a bound of the technique, not of rounding.
ADAMW_8BIT_DRIFT = 0.1  # found 0.068, and 0.078 for bitsandbytes, with gradients that differ by 100

# nf4: levels computed in float64 against a table printed from fp32; and how many of the scales' bytes are a neighbour.
NF4_LEVELS = 1e-6  # noise 1.8e-7
NF4_SCALE_CODES = 0.01  # noise 0.0034

# int8: products near 8 in fp16, whose rounding step there is 2**-8.
INT8_PRODUCT = 2**-7

# lora: results near 3, summed as W x + s B A x, as (W + s B A) x, and by peft.
LORA = 1e-5  # noise 7e-7

# loftq: the length of what a rank leaves of an error, relative to the least one, which float64 computes.
LOFTQ = 1e-5  # noise 1.3e-6, of the tiny Llama's matrices; 1.5e-12 of the toys

# lean_preparation: a bound of the technique: 20 losses near 6, adapters multiplied in bf16 and norms computed in it.
LEAN_LOSS = 0.05

# plain code: one step of a script with a technique and of the same without it; losses relative, gradients by lengths.
# In bf16, each number between two products may be rounded once more or once less, by up to 2**-9 of itself.
PLAIN_LOSS = {"Trainer": 1e-6, "own loop": 1e-6, "padding": 1e-6, "autocast": 2**-9}  # noise 8e-8; 3.6e-4
PLAIN_GRADIENT = {"Trainer": 1e-5, "own loop": 1e-5, "padding": 1e-5, "autocast": 2**-3}  # noise 2.3e-6; 3.2e-2
PLAIN_LOGITS = 2**-4  # of 16-bit weights, logits up to 5: noise 0 in the likeliest word's
