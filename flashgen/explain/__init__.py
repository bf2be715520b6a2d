"""What `flashgen explain` shows: a run of a kernel in the emulator, tile operation by tile operation, on a page of its own.

`run.py` runs and records, `lines.py` finds the lines, `events.py` makes tile operations of records (`counts.py` counts), `steps.py` a
schedule of those, with what is in shared memory (`shared_tiles.py`), what products compute (`computed_tiles.py`) and the stages of
warp-specialised kernels (`pipelined.py`, and `gradient_block.py` for backward passes), `rows.py` has the numbers of softmax's
rows, `product.py` takes the tiled product alone, `page.py` writes the page.
"""
