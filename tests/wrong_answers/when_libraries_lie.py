# Wrong answers to the exercises of lessons/when_libraries_lie.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: first of them stands before the point
smallest_difference = 2**-8

# %% 1: 8 significant bits, and from 1 to 2
smallest_difference = 1 / 32  # the step between 4 and 8, as in the lesson

# %% 1: 8 significant bits
smallest_difference = 2**-10  # fp16's

# %% 1: 8 significant bits
smallest_difference = 2**-6

# %% 2: its label is -100; look at the labels
def teaches_to_stop(row, end):
    return end in row["input_ids"]

# %% 2: cut within its last answer
def teaches_to_stop(row, end):
    return end in row["labels"]

# %% 2: line break is not trained
def teaches_to_stop(row, end):
    return row["labels"][-1] == end

# %% 2: line break is not trained
def teaches_to_stop(row, end):
    return row["input_ids"][-1] == end

# %% 2: fails on a row in which no label is trained
def teaches_to_stop(row, end):
    return [label for label in row["labels"] if label != -100][-1] == end

# %% 2: look at the labels
def teaches_to_stop(row, end):
    last = max(place for place, token in enumerate(row["input_ids"]) if token == end)
    return not any(label != -100 for label in row["labels"][last + 1 :])

# %% 3: each NaN adds S/n
train_loss_of_the_dead = 1.6 * 3 / 42

# %% 3: 42 steps share the sum
train_loss_of_the_dead = 1.6 * 3 * 11 / 4 / 10

# %% 3: later lines hold 0
train_loss_of_the_dead = 1.6

# %% 3: later lines hold 0
train_loss_of_the_dead = 0.0
