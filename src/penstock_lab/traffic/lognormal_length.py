"""Draws one lognormal length: what a workload does three times for each turn of a session."""

import math
import random

_RATIO = 4.0 * math.exp(-0.5) / math.sqrt(2.0)


def lognormal_length(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    """Draw a length whose logarithm is normal around ``median``'s, cut to [least, most].

    The normal deviate is a ratio of two uniform ones (Kinderman and Monahan, 1977), draw by draw that of
    `random.Random.normalvariate`: written out, it can be compiled, and costs one call in place of two.
    """
    uniform = rng.random
    while True:
        one, other = uniform(), 1.0 - uniform()
        deviate = _RATIO * (one - 0.5) / other
        if deviate * deviate / 4.0 <= -math.log(other):
            break
    drawn = round(math.exp(math.log(median) + deviate * sigma))
    return least if drawn < least else most if drawn > most else drawn
