"""Keys of a request that some row of a work item may see. Pages of all others may be gone."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32


@dataclass(frozen=True)
class KeyRange:
    """Tokens from `begin` to `end`. `begin` None: no window hides earlier tokens, so that none is compared."""

    begin: Int32 | None
    end: Int32

    def contains(self, token: Int32) -> Boolean:
        return self.overlaps(token, Int32(1))

    def overlaps(self, token: Int32, tokens: Int32) -> Boolean:
        """Return whether the first of `tokens` tokens lies before the end, and the last not before the begin."""
        before_end = token < self.end
        if self.begin is None:
            return before_end
        return cutlass.and_(token + tokens > self.begin, before_end)

    def relative_to(self, token: Int32) -> KeyRange:
        """Return the range with tokens counted from `token`."""
        return KeyRange(None if self.begin is None else self.begin - token, self.end - token)
