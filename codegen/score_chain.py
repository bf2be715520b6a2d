"""What texts of kernels say on behalf of modifiers: the chain of links that change scores and hide keys, and what depends on it."""

from __future__ import annotations

from collections.abc import Sequence

from .modifier import Modifier
from .problem import Problem

_WIDEST_SHARED = 128  # head dim of v, forward: wider ones leave too few registers beside out


def shares_distances(problem: Problem) -> bool:
    """Whether what is added by the distance from query to key alone is computed once for scores of one distance."""
    return problem.operation == "backward" or problem.head_dim_v <= _WIDEST_SHARED


def conditions(
    modifiers: Sequence[Modifier],
    operation: str,
    may_fetch: bool = True,
    may_share: bool = True,
    packed: bool = False,
    cached: bool = False,
    invariant: bool = False,
    e4m3: bool = False,
    early: bool = False,
    at_once: bool = False,
    linear: bool = False,
) -> dict[str, object]:
    """What texts say on behalf of modifiers: see templates/tile/common/score_changes.cuh.

    links: what `modified_chain` is made of; maps: a link maps scores; adds: links add to them; changes: one of the two;
    folds: a link maps, and nothing else changes scores, so that the map may be a part of the exponential; heads: links know heads;
    joins: a modifier joins row sums; drops: one drops elements of P; tensors: see `reads_scores`; collects: see `collects_gradients`;
    fetches: tensors are fetched, see `Modifier.fetched`, by kernels that can, as `may_fetch` says;
    linear: the exponential does that, see linear_terms.py; families that can do so say it, as they do of far: see far_keys.py;
    hides: see `Modifier.hides_keys`: some keys no query may see; overwrites: the first P V of a work tile writes O, and nobody sets it to
    zero: pays where work tiles are short, as windows make them, and spills beside changes of scores;
    ahead: what is added by the distance alone is read before scores are there: beside other changes registers do not do for it;
    may_share: see `shares_distances`; packed, cached: whether sequences are; invariant: whether results
    are, of the batch; e4m3: whether keys and values are; early: whether kernels load tensors of scores ahead, see `loads_ahead`;
    at_once: whether they change scores before the exponential, see `Family.changes_at_once`: then none of `folds` and `offsets`,
    of which the last says that the exponential adds what links leave to it; fronts: whether tiles may begin before the first key;
    opens: see `opens_keys`; by_key: see `Modifier.masks_by_key`; bends: a link bends scores, and their gradients know it; scatters: see
    `Modifier.scattered_by`; looks: see tree_mask.py; zeroes: sums of dQ are zeroed beside other work, where a family says so (its context);
    renews: whether stale row maxima are renewed, see stale_softmax.cuh; all others: see `TracedModifier.conditions`
    """
    maps, adds = any(one.maps_scores for one in modifiers), any(one.adds_to_scores for one in modifiers)
    found: dict[str, object] = {"maps": maps, "folds": maps and not adds and not at_once, "adds": adds, "changes": maps or adds}
    found |= {"linear": linear, "renews": not (found["folds"] or linear or at_once)}
    found |= {"at_once": at_once, "offsets": adds and not at_once, "fronts": at_once and cached}
    found |= {"packed": packed, "cached": cached, "invariant": invariant, "e4m3": e4m3, "early": early}
    found |= {"links": _links(modifiers), "collects": operation == "backward" and any(one.sum_parameters for one in modifiers)}
    named = {"heads": "has_heads", "joins": "joins_sums", "drops": "drops", "tensors": "reads_scores", "opens": "opens"}
    for name, attribute in {**named, "by_key": "masks_by_key", "hides": "hides_keys"}.items():
        found[name] = any(getattr(one, attribute) for one in modifiers)
    found["overwrites"] = found["hides"] and not found["changes"]
    found["bends"] = operation == "backward" and any(one.bends_scores for one in modifiers)
    found["fetches"] = may_fetch and any(one.fetched for one in modifiers)
    found["scatters"] = any(one.scattered_by is not None for one in modifiers)
    found |= dict.fromkeys(("traced", "traced_score", "traced_slope", "traced_gradients", "traced_tiles", "traced_distances"), "")
    found |= dict.fromkeys(("traced_mask", "learns", "ahead", "looks", "far", "zeroes"), False)
    for one in modifiers:
        found |= one.conditions
    if not may_share:
        found["traced_distances"] = ""
    alone = not (maps or found["drops"] or found["scatters"]) and sum(one.adds_to_scores for one in modifiers) == 1
    return {**found, "ahead": bool(found["ahead"]) and may_share and alone}


def _links(modifiers: Sequence[Modifier]) -> str:
    """Whether the chain is causal, and its links, with commas between them; empty without links.

    A link that opens holds all that hide keys, the causal mask among them.
    """
    changing = [one.link for one in modifiers if one.link and not (one.hides_keys or one.opens)]
    causal, hiding = "kCausal", [one.link for one in modifiers if one.hides_keys]
    for opening in (one.link for one in modifiers if one.opens):
        causal, hiding = "false", [f"{opening}<{', '.join((causal, *hiding))}>"]
    links = [*changing, *hiding]
    return ", ".join((causal, *links)) if links else ""


def chain_text(modifiers: Sequence[Modifier], sizes: str, batch: str = "", head: str = "") -> str:
    """What makes the chain in a kernel whose parameters are `p`, where its links know the entry of the batch, and heads, for these.

    sizes: len_q and len_kv, as they are called there, as are batch and head
    """
    links = _links(modifiers)
    if not links:
        return f"make_chain<kCausal>({sizes})"
    made = f"modified_chain<{links}>(p, {sizes})"
    if batch and any(modifier.opens for modifier in modifiers):
        made = f"of_batch({made}, {batch})"
    return f"of_head({made}, {batch}, {head})" if head and any(modifier.has_heads for modifier in modifiers) else made
