"""From (problem, workload, GPU) to a loaded kernel: imported ones, own records, shipped records, else the model's pick. No torch."""
