"""The blocks of a pool, one record each: who holds them, what they contain, and what keeps them from being reissued."""

from dataclasses import dataclass, field

Label = tuple[int, bytes, tuple[int, ...], int]
"""What a block contains: (group, salt, all tokens up to the block's end, part of its unit)."""


@dataclass
class Block:
    """One block. ``owners`` are rows (a row twice never happens); ``left`` says when the last of them gave it back."""

    owners: set[int] = field(default_factory=set)
    label: Label | None = None
    labelled: int = 0  # when it got its label
    fence: int | None = None
    copies: int = 0  # pending copies that read it
    left: int = 0

    def copy(self) -> "Block":
        """Return the same block again."""
        return Block(set(self.owners), self.label, self.labelled, self.fence, self.copies, self.left)


class Blocks:
    """All blocks of a pool but the null block, in plain dictionaries; every question is answered by looking at them all."""

    def __init__(self, num_blocks: int) -> None:
        self.all = {block: Block() for block in range(1, num_blocks)}
        self.retired: int | None = None
        self.clock = 0

    def tick(self) -> int:
        """Return the time, never the same twice."""
        self.clock += 1
        return self.clock

    def copy(self) -> "Blocks":
        """Return the same blocks again, to go back to."""
        other = Blocks(0)
        other.all = {block: one.copy() for block, one in self.all.items()}
        other.retired, other.clock = self.retired, self.clock
        return other

    def fenced(self, block: int) -> bool:
        """Return whether a step that is not retired, or a copy that is not committed, may still read a block."""
        one = self.all[block]
        running = one.fence is not None and (self.retired is None or one.fence > self.retired)
        return running or one.copies > 0

    def count(self) -> dict[str, int]:
        """Return how many blocks are free, cached, held and fenced."""
        found = {"free": 0, "cached": 0, "held": 0, "fenced": 0}
        for block, one in self.all.items():
            if one.owners:
                found["held"] += 1
            elif self.fenced(block):
                found["fenced"] += 1
            else:
                found["free" if one.label is None else "cached"] += 1
        return found

    def reissuable(self) -> list[int]:
        """Return the blocks that may be handed out next: empty ones if there are any, else the one given back first."""
        idle = [block for block, one in self.all.items() if not one.owners and not self.fenced(block)]
        empty = [block for block in idle if self.all[block].label is None]
        return empty or sorted(idle, key=lambda block: self.all[block].left)[:1]

    def available(self) -> int:
        """Return how many blocks could be handed out now."""
        counts = self.count()
        return counts["free"] + counts["cached"]

    def holding(self, label: Label) -> list[int]:
        """Return the blocks that contain exactly this, the oldest first."""
        found = [block for block, one in self.all.items() if one.label == label]
        return sorted(found, key=lambda block: self.all[block].labelled)

    def label(self, block: int, label: Label) -> None:
        """Say what a block contains, unless that is known."""
        one = self.all[block]
        if one.label is None:
            one.label, one.labelled = label, self.tick()

    def take(self, block: int, row: int) -> None:
        """Hand out a block, empty, to its first owner."""
        one = self.all[block]
        one.owners, one.label, one.fence = {row}, None, None

    def adopt(self, block: int, row: int) -> None:
        """Give a block one more owner."""
        self.all[block].owners.add(row)

    def drop(self, block: int, row: int, fence: int | None) -> None:
        """Take an owner from a block; a step numbered ``fence`` may still read it."""
        one = self.all[block]
        one.owners.remove(row)
        one.left = self.tick()
        if fence is not None:
            one.fence = fence if one.fence is None else max(one.fence, fence)

    def retire(self, n: int) -> None:
        """Let the blocks of every fence up to n be reissued, each on the turn that it has waited for."""
        self.retired = n if self.retired is None else max(self.retired, n)

    def copied(self, source: int) -> None:
        """One copy fewer is going to read a block."""
        self.all[source].copies -= 1
