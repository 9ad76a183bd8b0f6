"""Which rows of a step a norm gives, an attribute of norms:

all         all of them
last        the last live one
answers:N   those whose logits are wanted, at most N: the single rows, then the last row of the chunk
"""


def output_rows(rows: str, m: int) -> int:
    """How many rows the result of a norm of m rows has."""
    kind, _, count = rows.partition(":")
    return {"all": m, "last": 1}[kind] if kind != "answers" else int(count)
