"""Random numbers as a function of seed and position, the same on host and device and for any batch: Philox4x32-10
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""

SEED_BITS = 64
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
_WORD = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four words of 32 random bits each. key, counter: words of 32 bits."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = second >> 32 ^ b ^ k0, second & _WORD, first >> 32 ^ d ^ k1, first & _WORD
        k0, k1 = k0 + WEYL[0] & _WORD, k1 + WEYL[1] & _WORD
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """A number x, 0 <= x < 1. seed: at most SEED_BITS bits. position: at most 32 bits."""
    return philox((seed & _WORD, seed >> 32), (position, 0, 0, 0))[0] / (_WORD + 1)


def seed_of(seed: int, index: int) -> int:
    """The seed of answer `index` to a request with this seed: the seed itself for answer 0, otherwise a random number
    with a counter that `uniform` does not use. So no two answers have the same random numbers, whatever the seeds of
    their requests are."""
    low, high, *_ = philox((seed & _WORD, seed >> 32), (index, 0, 0, 1))
    return high << 32 | low if index else seed
