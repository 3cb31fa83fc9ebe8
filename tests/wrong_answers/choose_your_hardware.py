# Wrong answers to the exercises of lessons/choose_your_hardware.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: 2 bytes for each number of input, matrix and output
tokens_at_the_ridge = 65e12 / 320e9

# %% 1: 2 operations for each product
tokens_at_the_ridge = 406.25 * 2048 * 8192 / (2048 * 8192 - 406.25 * (2048 + 8192))

# %% 1: input, matrix and output
tokens_at_the_ridge = 203.125 * 2048 * 8192 / (2048 * 8192 - 203.125 * 8192)

# %% 1: 2 bytes for each number
tokens_at_the_ridge = 65e12 / 320e9 / 2

# %% 2: the run does not fit it
def choose(found, minutes):
    possible = [offer for offer in found if offer.minutes <= minutes]
    return min(possible, key=lambda offer: offer.cost).flavor if possible else "none"

# %% 2: takes 30.0 of
def choose(found, minutes):
    possible = [offer for offer in found if offer.fits]
    return min(possible, key=lambda offer: offer.cost).flavor if possible else "none"

# %% 2: is not the cheapest by its cost
def choose(found, minutes):
    possible = [offer for offer in found if offer.fits and offer.minutes <= minutes]
    return min(possible, key=lambda offer: offer.minutes).flavor if possible else "none"

# %% 2: is not the cheapest by its cost
def choose(found, minutes):
    possible = [offer for offer in found if offer.fits and offer.minutes <= minutes]
    return min(possible, key=lambda offer: offer.high).flavor if possible else "none"

# %% 2: exactly that many are allowed
def choose(found, minutes):
    possible = [offer for offer in found if offer.fits and offer.minutes < minutes]
    return min(possible, key=lambda offer: offer.cost).flavor if possible else "none"

# %% 2: a machine is done within
def choose(found, minutes):
    offer = min((offer for offer in found if offer.fits), key=lambda offer: offer.cost, default=None)
    return offer.flavor if offer and offer.minutes <= minutes else "none"

# %% 2: the answer is a function \(found, minutes\) -> the name
def choose(found, minutes):
    possible = [offer for offer in found if offer.fits and offer.minutes <= minutes]
    return min(possible, key=lambda offer: offer.cost) if possible else "none"

# %% 3: ten more, on both
usd_an_hour = 0.40 * 10.19 / 1.14

# %% 3: ten more, on both
usd_an_hour = 0.40 * (10 + 10.19) / 1.14

# %% 3: what may an hour cost
usd_an_hour = 0.40 * (10 + 10.19) / 60

# %% 3: equal bills
usd_an_hour = 0.40 * (10 + 1.14) / (10 + 10.19)
