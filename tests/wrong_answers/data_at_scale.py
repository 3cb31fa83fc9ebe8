# Wrong answers to the exercises of lessons/data_at_scale.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: overlap
rows_of_the_book = 50  # no overlap

# %% 1: what is left over takes a row
rows_of_the_book = (100_500 - 256) // (2048 - 256)

# %% 1: after the first row
rows_of_the_book = -(-100_500 // (2048 - 256))  # as if the first row brought no more than the others

# %% 1: left over takes a row
rows_of_the_book = (100_500 - 256) / (2048 - 256)

# %% 2: must not change again
def renumber(text, order):
    for place, old in enumerate(order, 1):
        text = text.replace(f"[{old}]", f"[{place}]")
    return text

# %% 2: order\[0\] is 2
def renumber(text, order):
    import re
    return re.sub(r"\[(\d+)\]", lambda found: f"[{order[int(found[1]) - 1]}]", text)

# %% 2: without brackets is no label
def renumber(text, order):
    import re
    new = {old: place for place, old in enumerate(order, 1)}
    return re.sub(r"\d+", lambda found: str(new.get(int(found[0]), found[0])), text)

# %% 2: two digits
def renumber(text, order):
    import re
    new = {old: place for place, old in enumerate(order, 1)}
    return re.sub(r"\[(\d)\]", lambda found: f"[{new[int(found[1])]}]", text)

# %% 2: labels may follow one another
def renumber(text, order):
    import re
    new = {old: place for place, old in enumerate(order, 1)}
    return re.sub(r"\[(\d+)\](?!\[)", lambda found: f"[{new[int(found[1])]}]", text)

# %% 3: take the largest r
numbers_in_a_band = 4  # they meet oftener still

# %% 3: reaches 0\.9
numbers_in_a_band = 16

# %% 3: compute the chance
numbers_in_a_band = 32

# %% 3: with its own number of bands
numbers_in_a_band = 0.8**8 * 16
