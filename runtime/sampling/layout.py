"""The io buffers with the parameters of a device's sampling, which the runtime writes and the kernels read.

A function that samples has a row of each of these buffers for every row of its logits:

    sampling  int32 [n, WORDS]            one word for each name of FIELDS; floats and unsigned numbers by their bits
    changes   int32 [n, CHANGES, 2]       changes of single tokens' logits: the token, RECENT added if it is a recent
                                          one, and the bits of the float32 that is added to its logit; the word
                                          `changes` counts those that are used, each of another token
    allowed   int32 [n, ceil(padded vocabulary / 32)]   bit t % 32 of word t // 32: token t may be chosen. Read for rows
                                          with the flag MASK only

Disabled parameters have neutral values; words that are all zero select the largest logit.
"""

WORDS = 16
# Words of a row of `sampling`. heat: log2(e) / temperature. min_p: its logarithm. penalty: of repetition; inverse: 1 /
# penalty. position: of the token that is chosen, which is the counter of its random number.
FIELDS = (
    "flags", "changes", "top_k", "position", "seed_low", "seed_high", "heat", "top_p", "min_p", "penalty", "inverse",
)  # fmt: skip
# Flags: a draw, else the largest logit; there are changes or a mask; there is a mask; the log-probability is wanted.
DRAW, ADJUST, MASK, LOGPROB = 1, 2, 4, 8
RECENT = 1 << 30  # in the first word of a change: the token is a recent one, which the repetition penalty applies to
TOKEN = RECENT - 1
NO_MIN_P = -3.0e38
ALL_ALLOWED = -1.0e30  # a min_p that excludes only what a mask does
LISTED = 1024  # tokens, at least, that a device draws from without reading the row again
CHANGES = 256  # of a row, at most


def row_shapes(n: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the buffers for n rows of so many logits, padding included; all are int32."""
    return {"sampling": (n, WORDS), "changes": (n, CHANGES, 2), "allowed": (n, -(-columns // 32))}
