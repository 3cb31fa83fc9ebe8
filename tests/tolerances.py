"""How far apart two numbers may be that are equal but for rounding. Each stands with the noise it was sized to.

Noise was measured on one thread of a Xeon (CPU, torch 2.13.0+cpu, 2026-11-21). Not listed is what must be equal bit
for bit.
"""

# gradient_accumulation: the difference of two gradients, over the gradient, by their lengths.
ACCUMULATED_GRADIENT = 1e-6  # 1.6e-7 on the toy, 5.8e-7 on the tiny Llama, whose one batch is 6.5e-7 from float64
