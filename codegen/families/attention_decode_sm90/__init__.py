"""Attention forward on Hopper where few queries meet many keys: see family.py."""

from .family import FAMILY

__all__ = ["FAMILY"]
