"""Decides the text of a kernel: what is asked for, what may be chosen, what the hardware allows, and the rendering.

Standard library and Jinja only: nothing here imports CUDA or PyTorch, or reads an environment variable.
"""
