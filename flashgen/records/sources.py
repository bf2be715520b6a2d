"""The process's tuning records: the user's own, and those that come with the package."""

from __future__ import annotations

from functools import cache

from .shipped import ShippedRecords
from .store import Records


@cache
def own_records() -> Records:
    """The user's tuning records."""
    return Records()


@cache
def shipped_records() -> ShippedRecords:
    """The tuning records that come with the package."""
    return ShippedRecords()
