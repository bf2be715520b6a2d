"""Expressions of scores and masks: what a score_mod or a mask_mod computes for one query and one key, as a tree.

- `tree`: nodes and leaves. `operators`: what there is to compute, and its meaning on numbers. `build`: the one way to make a node, which
  brings it into its simplest form
- `canonical_text`: a text for each tree, and back. `numbering`: names of numbers and tensors that follow from the tree
- `derivative`, `evaluation`; `cxx` prints C++, `stages` says what of it can be computed once a head, row or column
- `recognition`: windows, ALiBi and other forms that kernels have faster ways for

Nothing here knows PyTorch: flashgen/traced makes expressions of Python functions.
"""
