"""From Python functions with FlexAttention's signatures to expressions (flashgen/codegen/expressions): score_mod and mask_mod.

- `tracing`: runs a function on stand-ins and takes down what it computes. `traced_tensor` stands for tensors, `captured_number` for
  Python numbers, `captures` for all else that a function captures; `torch_functions` says what is understood, `promotion` in which dtype
- `reuse`: what was traced is used again for functions that differ in values alone. Captured values are read anew on each call
- `modifier`: what a score_mod and a mask_mod are together, and `compile_modifier`
- `recording`: what torch.compile notes of functions, where it cannot look into a trace; `replay` makes expressions of it
- `evaluation`: expressions in plain PyTorch, for oracles
"""
