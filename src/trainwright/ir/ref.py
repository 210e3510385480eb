"""Names of buffers.

In a template (the actions of one slot, written once for all microbatches and all alike stages) a Ref is relative: its block
counts from the first block of the stage, and `microbatch` is 0 for what each microbatch has its own of, None otherwise.
`at` makes it absolute.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer of one rank: `tensor` names what it holds; the rest tells which one.

    >>> str(Ref("h1", block=3, microbatch=2)), str(Ref("embed.weights"))
    ('b3.h1@2', 'embed.weights')
    """

    tensor: str
    block: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        """`b3.h1@2`: block 3, microbatch 2."""
        block = "" if self.block is None else f"b{self.block}."
        return f"{block}{self.tensor}" + ("" if self.microbatch is None else f"@{self.microbatch}")

    def at(self, microbatch: int | None, first_block: int) -> Ref:
        """The absolute name, in the run of a template for `microbatch` at the stage that begins with `first_block`."""
        return Ref(
            self.tensor,
            None if self.block is None else self.block + first_block,
            None if self.microbatch is None else microbatch,
        )
