# Wrong answers to the exercises of lesson 26. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
rows_of_the_book = 49

# %% 2:
def renumber(text, order):
    for place, old in enumerate(order, 1):
        text = text.replace(f'[{old}]', f'[{place}]')
    return text

# %% 3:
numbers_in_a_band = 16
