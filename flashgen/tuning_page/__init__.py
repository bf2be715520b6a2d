"""The page that `flashgen tune --html` writes: winners on the roofline, and of each cell the search space, and the model against the clock.

`data.py` makes values of a result, `page.py` a page of those, and puts it where the user wants it; the scripts draw.
"""
