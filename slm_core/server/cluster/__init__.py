"""Many replicas behind one address: ``slm serve --ray``. It needs ``pip install "slm-core[ray]"``.

A replica is the whole application (``replica``). Clients call the front (``front``): it reads a request, and passes it
to the replica that ``routing`` chooses. Only ``deployment`` knows Ray.
"""
