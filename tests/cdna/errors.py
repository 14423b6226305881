"""What the executor raises. Each names the kernel's line, so a fault can be found in the text."""

from __future__ import annotations


class CdnaError(RuntimeError):
    """Base of all; `where` is filled in as the error leaves the machine."""

    where = ""

    def __str__(self) -> str:
        return f"{super().__str__()}{self.where}"


class UnknownInstruction(CdnaError):
    """A kernel uses an instruction, or a form of one, that no table holds."""


class MemoryFault(CdnaError):
    """An access outside the tensors of the launch, the LDS or the scratch."""


class Race(CdnaError):
    """Two waves meet in LDS without a barrier between them."""


class Trap(CdnaError):
    """The kernel ran into s_trap, as a failed device assertion does."""


class Stuck(CdnaError):
    """Waves wait at a barrier that the rest of their workgroup never reaches, or run forever."""
