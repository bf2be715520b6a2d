"""`flashgen compare`: time, memory and traffic of every rung of the ladder, beside PyTorch's attentions and the eager code of articles.

`shapes.py` has the cells and who takes part, `formula.py` what follows from sizes alone. `measured.py` runs them on the GPU that is here,
with their gradients by `with_backward.py`, `predicted.py` asks the models for one that is not. `result.py` holds what was found,
`report.py`, `plot.py` and `files.py` tell it.
"""
