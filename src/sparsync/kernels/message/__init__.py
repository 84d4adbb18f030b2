"""Make and read messages: on the device by Triton kernels (``*_triton.py``), on the host by compiled loops
(``*_cpu.py``).

``wire/device.py`` launches the kernels, ``wire/host.py`` calls the loops; ``wire/message.py`` is the specification. On
the device, ``bitmap_triton.py`` sorts entries, ``header_triton.py`` and ``encode_triton.py`` write a message,
``decode_triton.py`` reads it, ``mean_triton.py`` sums those of all ranks, and ``norm_triton.py`` gives that mean
another norm. Nothing waits for the host.
"""
