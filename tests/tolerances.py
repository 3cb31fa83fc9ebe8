"""Every tolerance of the techniques' tests, each with the noise it was sized to."""

# packing: float64 sums of up to 64 products in another order; measured 2e-16.
PACKED_ATTENTION = 1e-14
# packing: fp32 losses near 6 whose sums run over rows of another length; measured 5e-7.
PACKED_LOSS = 1e-6
