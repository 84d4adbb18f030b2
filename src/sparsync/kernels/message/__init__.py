"""Make and read messages on the device.

``wire/device.py`` launches the kernels; ``wire/message.py`` is the specification.
"""
