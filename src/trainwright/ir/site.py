"""Where an action happens.

**step** counts optimizer steps. **stage** is the virtual pipeline stage, 0 ... P*V - 1 in model order (the place on the
pipeline axis is the *position*; the schedule maps one to the other). **microbatch** is the part of the batch that travels
together. **block** is a transformer block, numbered over the whole model. **segment** is a piece of a block, of the embedding or
of the head. **phase** says in which pass: `fwd`, `re` (forward again, because the activations were dropped), `bwd`, `upd`.
**tag** is the name of the strategy that put the action there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PHASES = ("fwd", "re", "bwd", "upd")

_NUMBERED = {"t": "step", "s": "stage", "m": "microbatch"}
_BLOCK = re.compile(r"b(\d+)(?:\.(.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place of a step; fields that do not apply are None. Prints and parses.

    >>> str(Site(stage=1, microbatch=3, block=7, segment="attend", phase="bwd", tag="tensor"))
    's1/m3/b7.attend/bwd#tensor'
    >>> Site.parse("s1/m3/b7.attend/bwd#tensor").block
    7
    """

    step: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    block: int | None = None
    segment: str | None = None
    phase: str | None = None
    tag: str | None = None

    def __str__(self) -> str:
        """The compact form: parts joined by `/`, the tag after `#`."""
        parts = [f"{letter}{getattr(self, name)}" for letter, name in _NUMBERED.items() if getattr(self, name) is not None]
        if self.block is not None:
            parts.append(f"b{self.block}" + (f".{self.segment}" if self.segment else ""))
        elif self.segment:
            parts.append(self.segment)
        if self.phase:
            parts.append(self.phase)
        return "/".join(parts) + (f"#{self.tag}" if self.tag else "")

    @classmethod
    def parse(cls, text: str) -> Site:
        """The Site that prints as `text`; ValueError names the part that is not understood."""
        path, _, tag = text.partition("#")
        fields: dict[str, int | str | None] = {"tag": tag or None}
        for part in filter(None, path.split("/")):
            if (block := _BLOCK.fullmatch(part)) is not None:
                fields |= {"block": int(block[1]), "segment": block[2]}
            elif part[0] in _NUMBERED and part[1:].isdigit():
                fields[_NUMBERED[part[0]]] = int(part[1:])
            elif part in PHASES:
                fields["phase"] = part
            elif part.isidentifier() and "segment" not in fields:
                fields["segment"] = part
            else:
                msg = f"{part!r} is no part of a site in {text!r}"
                raise ValueError(msg)
        return cls(**fields)  # type: ignore[arg-type]  # keys and types are those of the fields, by the branches above

    def at(self, *, step: int | None = None, stage: int | None = None, microbatch: int | None = None, first_block: int = 0) -> Site:
        """The site of a template's action in one run of the template: stage and microbatch filled in, blocks counted from `first_block`."""
        return Site(
            step=step,
            stage=stage if self.stage is None else self.stage,
            microbatch=microbatch if self.microbatch is None else self.microbatch,
            block=None if self.block is None else self.block + first_block,
            segment=self.segment,
            phase=self.phase,
            tag=self.tag,
        )

    def tagged(self, tag: str) -> Site:
        """The same place, for an action of the strategy `tag`."""
        return Site(
            step=self.step,
            stage=self.stage,
            microbatch=self.microbatch,
            block=self.block,
            segment=self.segment,
            phase=self.phase,
            tag=tag,
        )
