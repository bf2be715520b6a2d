"""The PyTorch operators: how PyTorch sees flashgen."""
