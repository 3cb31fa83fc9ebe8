# Wrong answers to the exercises of lesson 15. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
tokens_at_the_ridge = 65e12 / 320e9

# %% 2:
def choose(found, minutes):
    possible = [offer for offer in found if offer.minutes <= minutes]
    return min(possible, key=lambda offer: offer.high).flavor if possible else "none"

# %% 3:
usd_an_hour = 0.40 * 5.48 / 1.13
