"""Earlier names of config fields, of their values and of bench results, which records, manifests, `--set` and bench files may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = {"first": "first_product", "packed_heads": "pack_gqa", "reference": "row_max", "turns": "ping_pong"}
VALUES = {
    "first_product": {"output": "pv", "scores": "qk"},
    "row_max": {"lazy": "stale", "maximum": "exact"},
}
BENCH_FIELDS = {"host": "call_overhead", "host_errors": "call_overhead_errors"}


def renamed(values: Any) -> Any:
    """A config's fields under their present names. Leaves alone what is no mapping, and a field whose present name is there as well."""
    if not isinstance(values, Mapping):
        return values
    found: dict[Any, Any] = {}
    for name, value in values.items():
        present = FIELDS.get(name, name) if isinstance(name, str) else name
        if present != name and present in values:
            present = name  # both: the earlier one is then refused as unknown
        known = VALUES.get(present, {}) if isinstance(present, str) else {}
        found[present] = known.get(value, value) if isinstance(value, str) else value
    return found


def renamed_bench(values: dict[str, Any]) -> dict[str, Any]:
    """A bench file's fields under their present names. Leaves alone a field whose present name is there as well."""
    names = {name: present for name, present in BENCH_FIELDS.items() if present not in values}
    return {names.get(name, name): value for name, value in values.items()}
