"""What a product is about: the tiles that it computes, by those that it reads from shared memory and those in the warps' registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ComputedTiles:
    """What warps have computed last."""

    in_registers: list[str] = field(default_factory=list)  # tiles of S or dS
    query_tile: str = "0"


def product_of(read: Sequence[str], state: ComputedTiles) -> tuple[list[str], list[str]]:
    """S = Q K^T where a tile of K was read from shared memory, else O += P V: P is read, too, or it is S in the warps' registers.

    In a backward pass dP = dO V^T where V and dO were read, dQ += dS K where dS and K were; where Q or dO was read alone, dK += dS^T Q or
    dV += P^T dO, with dS or P in registers.
    """
    of = {letter: [tile[1:] for tile in read if tile[0] == letter] for letter in "QKVPos"}
    if of["s"]:
        return [f"A{state.query_tile}"], list(read)
    if of["o"] and of["V"]:
        state.in_registers = [f"s{of['o'][0]},{key}" for key in of["V"]]
        return state.in_registers, list(read)
    if of["o"] or (of["Q"] and not of["K"]):
        factors = [("S" if of["o"] else "s") + tile[1:] for tile in state.in_registers]
        return [("v" if of["o"] else "k") + tile.partition(",")[2] for tile in factors], [*factors, *read]
    if of["K"]:
        state.query_tile = (of["Q"] or [state.query_tile])[0]
        state.in_registers = [f"S{state.query_tile},{key}" for key in of["K"]]
        return state.in_registers, list(read)
    if of["P"]:
        state.query_tile = of["P"][0].split(",")[0]
        return [f"O{state.query_tile}"], list(read)
    return [f"O{state.query_tile}"], [*state.in_registers, *read]
