"""The configuration tree: frozen dataclasses, a strict loader, no torch.

Second in the flow, after ``errors``. ``model``, ``residual``, ``training`` hold the sections, ``ladder`` the named
sizes, ``tree`` the whole (``RunConfig``), ``strict`` turns YAML and ``--set`` into it and back.
"""
