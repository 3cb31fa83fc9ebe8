# Wrong answers to the exercises of lessons/kwanzaa.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: seven matrices of every block
bytes_at_rank_32 = 6_000_000

# %% 1: in proportion to the rank
bytes_at_rank_32 = 45_088_768

# %% 1: numbers of 4 bytes
bytes_at_rank_32 = lora_numbers(CONFIGS["llama-3.2-1b"], r=32)

# %% 1: in proportion to the rank
bytes_at_rank_32 = 4 * 45_088_768

# %% 2: for each number two moments
def checkpoint_bytes(numbers, bits):
    return 4 * numbers

# %% 2: two moments
def checkpoint_bytes(numbers, bits):
    return 4 * numbers + numbers * bits // 8

# %% 2: a byte has 8
def checkpoint_bytes(numbers, bits):
    return 4 * numbers + 2 * numbers * bits

# %% 2: two moments of 32 bits
def checkpoint_bytes(numbers, bits):
    return 6 * numbers

# %% 2: numbers of 4 bytes
def checkpoint_bytes(numbers, bits):
    return 2 * numbers * bits // 8

# %% 2: numbers of 4 bytes
def checkpoint_bytes(numbers, bits):
    return 2 * (4 * numbers + 2 * numbers * bits // 8)

# %% 3: time is the limit, not the data
rows_in_12_hours = 107

# %% 3: then their rows
rows_in_12_hours = int(12 * 3600 / seconds)

# %% 3: whole steps
rows_in_12_hours = int(12 * 3600 / seconds * 8)

# %% 3: whole steps in 12 hours
rows_in_12_hours = int(12 * 60 / seconds) * 8
