"""How far apart two numbers may be that are equal but for rounding. Each stands with the noise it was sized to.

Noise was measured on one thread of a Xeon (CPU, torch 2.13.0+cpu, 2026-11-21). Not listed is what must be equal bit
for bit.
"""

# chunked_loss: losses relative, gradients by the length of the difference over the gradient's.
CHUNKED_LOSS = 1e-6  # sums in another order leave 2.4e-7
CHUNKED_GRADIENT = 2e-6  # 5e-7 for the hidden states; 9.3e-7 for the tiny Llama's adapters below them
CHUNKED_DERIVATIVE = 1e-3  # a fp32 sum near 40 rounds to 4e-6: over two steps of 1e-2, 2e-4
CHUNKED_AUTOCAST = 1e-3  # bf16 logits move the mean of 40 losses by 4e-5
CHUNKED_SMALL_FP16 = 0.15  # fp16 logits near 24, rounded to 1/64, leave 0.088

# gradient_accumulation: the difference of two gradients, over the gradient, by their lengths.
ACCUMULATED_GRADIENT = 1e-6  # 1.6e-7 on the toy, 5.8e-7 on the tiny Llama, whose one batch is 6.5e-7 from float64
