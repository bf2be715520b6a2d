"""flashgen behind the names that people call today, one module or package for each library.

What belongs here: checks, names and layouts of other libraries' interfaces; the attention itself is that of flashgen's public calls. A
library is imported only when its module is used, and importing this package alone loads nothing.
"""
