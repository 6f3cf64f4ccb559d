"""Parts of ``deployments_cpu.py``: workload, variants, launch, CPU shares, measures, and hooks inside the runs."""
