# Wrong answers to the exercises of lessons/paged_optimizer.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: still has fewer than 100,000
lowest_rank = 48

# %% 1: whole number
lowest_rank = 100_000 / 2048

# %% 1: two moments together
lowest_rank = 25

# %% 1: elements, not bytes
lowest_rank = 13

# %% 1: paging has another
lowest_rank = 2

# %% 1: how many elements has A
lowest_rank = 64

# %% 2: which pages does the last step leave
def order(steps, places):
    return places[::-1]

# %% 2: which pages does the last step leave
def order(steps, places):
    return places

# %% 2: which pages does the last step leave
def order(steps, places):  # another beginning in each step
    start = steps % len(places)
    return places[start:] + places[:start]

# %% 2: which pages does the last step leave
def order(steps, places):
    import random

    return random.Random(steps).sample(places, len(places))

# %% 2: exactly once in each step
def order(steps, places):  # every other place
    return places[steps % 2 :: 2]

# %% 2: exactly once in each step
def order(steps, places):  # there and back in one step
    return places + places[::-1]

# %% 2: not a list
def order(steps, places):
    return reversed(places) if steps % 2 else iter(places)

# %% 2: which pages does the last step leave
def order(steps, places):  # the weights in turn, their pieces as before
    return sorted(places, key=lambda place: place[0] if steps % 2 else -place[0])

# %% 3: count two transfers
micro_batches = next(
    k
    for k in range(1, 99)
    if step(with_settings(full, [f"tricks.gradient_accumulation={k}"]), shape, CARDS["t4"]).seconds
    >= 10 * paged_bytes["adamw"] / link
)

# %% 3: half of its data sheet's rate
micro_batches = next(
    k
    for k in range(1, 99)
    if step(with_settings(full, [f"tricks.gradient_accumulation={k}"]), shape, CARDS["t4"]).seconds
    >= 5 * paged_bytes["adamw"] / link
)

# %% 3: just too few
micro_batches = next(
    k
    for k in range(1, 99)
    if step(with_settings(full, [f"tricks.gradient_accumulation={k}"]), shape, CARDS["t4"]).seconds
    >= 20 * paged_bytes["adamw"] / link
) - 1

# %% 3: one micro-batch fewer is enough
micro_batches = next(
    k
    for k in range(1, 99)
    if step(with_settings(full, [f"tricks.gradient_accumulation={k}"]), shape, CARDS["t4"]).seconds
    >= 20 * paged_bytes["adamw"] / link
) + 1

# %% 3: compare these two times
micro_batches = next(
    k
    for k in range(1, 99)
    if step(with_settings(full, [f"tricks.gradient_accumulation={k}"]), shape, CARDS["t4"]).seconds
    >= 80 * paged_bytes["adamw"] / link
)
