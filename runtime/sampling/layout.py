"""The io buffers with the parameters of sampling on a device. The runtime writes them, the kernels read them.

A function that samples has a row of each of these buffers for every row of its logits:

    sampling  int32 [n, WORDS]            one word for each name of FIELDS; floats and unsigned numbers by their bits
    changes   int32 [n, CHANGES, 2]       changes of the logits of single tokens. First word: the token, plus RECENT if
                                          it is a recent token. Second word: the bits of the float32 that is added to
                                          its logit. The word `changes` of `sampling` is the number of used entries;
                                          their tokens are distinct
    allowed   int32 [n, ceil(padded vocabulary / 32)]   bit t % 32 of word t // 32: token t may be chosen. Only read for
                                          rows with the flag MASK

Disabled parameters have neutral values. A row of zeros selects the largest logit.
"""

WORDS = 16
# Words of a row of `sampling`. heat: log2(e) / temperature. min_p: the logarithm of min-p. penalty: the repetition
# penalty. inverse: 1 / penalty. position: of the chosen token; it is the counter of its random number.
FIELDS = (
    "flags", "changes", "top_k", "position", "seed_low", "seed_high", "heat", "top_p", "min_p", "penalty", "inverse",
)  # fmt: skip
# Flags. DRAW: a random choice, otherwise the largest logit. ADJUST: there are changes or a mask. MASK: there is a mask.
# LOGPROB: the log-probability is wanted.
DRAW, ADJUST, MASK, LOGPROB = 1, 2, 4, 8
RECENT = 1 << 30  # in the first word of a change: the repetition penalty applies to the token
TOKEN = RECENT - 1
NO_MIN_P = -3.0e38
ALL_ALLOWED = -1.0e30  # a min_p that excludes only what a mask excludes
LISTED = 1024  # if no more tokens than this remain, every device lists them, and does not read the row again
CHANGES = 256  # largest number of changes of a row


def row_shapes(n: int, columns: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the buffers for n rows of logits. All are int32. columns: logits of a row, padding included."""
    return {"sampling": (n, WORDS), "changes": (n, CHANGES, 2), "allowed": (n, -(-columns // 32))}
