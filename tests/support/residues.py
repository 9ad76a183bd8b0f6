"""A constraint without a grammar, for models whose tokens mean nothing."""

import numpy as np

from mlc_amd.runtime.sampling.device_rows import mask_words


class Residues:
    """A `RewindableConstraint`: which token may follow depends on the sum of all before it. The last places of every
    five, as many as `forced`, force their token."""

    def __init__(self, vocab, ends, forced=1):
        self.vocab, self.ends, self.forced = vocab, list(ends), forced
        self.accepted: list[int] = []

    complete = False

    def _free(self):
        allowed = np.arange(self.vocab) % 3 == sum(self.accepted) % 3
        allowed[self.ends] = False
        if len(self.accepted) % 5 >= 5 - self.forced:
            allowed[allowed.nonzero()[0][1:]] = False
        return allowed

    def allowed(self):
        return mask_words(self._free())

    def accept(self, token):
        assert self._free()[token]
        self.accepted.append(token)

    def guesses(self, drafts, most):
        found = []
        while len(found) < most:
            allowed = self._free()
            if len(found) < len(drafts) and allowed[drafts[len(found)]]:
                self.accept(drafts[len(found)])
            elif allowed.sum() == 1:
                self.accept(int(allowed.argmax()))
                drafts = ()
            else:
                break
            found.append(self.accepted[-1])
        self.rewind(len(found))
        return found

    def rewind(self, count):
        del self.accepted[len(self.accepted) - count :]
