"""The benchmark: attention implementations side by side on one GPU, in one process, so that their ratios can be believed.

`cells.py` holds what is measured, `peers.py` and `sdpa.py` who is, `work.py` what of an operation is timed, `check.py` whether it is right;
`runner.py` measures cells, `call_overhead.py` the CPU's cost, and `session.py` makes a run of them. `result.py` holds what was found,
`report.py` its tables, `plot.py` its figures, `files.py` what of it is written: these four and `cells.py` do not load PyTorch, so that a
saved result can be drawn anywhere.
"""
