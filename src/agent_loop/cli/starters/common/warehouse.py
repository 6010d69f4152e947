"""The warehouse: which part an order is about, and which shelf holds the part."""

import random

_rng = random.Random(0)
PART_OF_ORDER = {order: _rng.randrange(100, 1000) for order in range(1000, 10_000)}
SHELF_OF_PART = {part: _rng.randrange(10, 100) for part in range(100, 1000)}
