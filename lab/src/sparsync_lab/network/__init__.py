"""The network lab: worker processes on hosts of their own, whose links are as slow as a user's.

``namespace`` and ``star`` make hosts and links, ``shaping`` holds links to rates, ``host_workers`` starts a worker on
every host; ``emulated_model`` waits instead of computing, ``methods`` exchanges its gradients in all ways, ``steps``
times and counts them on one set of links, and ``sweep`` goes through many.
"""
