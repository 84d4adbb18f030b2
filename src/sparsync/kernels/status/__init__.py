"""Decide on the device what an exchange comes to. ``collectives/comm/device_status.py`` launches the kernels."""
