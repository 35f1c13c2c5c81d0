"""Every struct that crosses a process boundary, a module for each pair that talks.

``client``: client <-> frontend, the public protocol. ``requests``: frontend <-> scheduler. ``hub``:
every process <-> the hub. ``target`` and ``draft``: scheduler <-> target or draft, once a round,
over shared memory where they can. ``sampling``: how tokens are chosen, which several of them carry.

All are MessagePack through msgspec; nothing is pickled, and nothing here imports torch.
"""
