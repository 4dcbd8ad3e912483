"""Decentralized Diffusion Models, one idea per file. Start reading at `schedule.py`."""
